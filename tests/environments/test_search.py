from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
import urllib.request

import pytest

from rl2lightning.environments.search import SearchTool
from rl2lightning.environments.search_server import BM25, main, read_corpus, serve
from rl2lightning.environments.tool_calls import TagFormat
from rl2lightning.environments.tools import ToolEnvironment
from rl2lightning.service import ServiceError

DOCUMENTS = ["Ada Lovelace\nwrote the first program", "Alan Turing\nbroke a code", "Grace Hopper\nwrote a compiler"]


@pytest.fixture
def server():
    server = serve(BM25(DOCUMENTS))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/retrieve"
    server.shutdown()
    server.server_close()


def test_bm25_on_a_hand_worked_collection():
    # N = 2 documents of 2 and 4 words, mean 3; "b" is in both, "a" once in the first only
    index = BM25(["a b", "b b c d"], k1=1.2, b=0.75)
    idf_a, idf_b = math.log(1 + 1.5 / 1.5), math.log(1 + 0.5 / 2.5)
    norm = 1.2 * (0.25 + 0.75 * 2 / 3), 1.2 * (0.25 + 0.75 * 4 / 3)
    assert index("A, b?", 5) == [
        ("a b", pytest.approx(idf_a * 2.2 / (1 + norm[0]) + idf_b * 2.2 / (1 + norm[0]))),
        ("b b c d", pytest.approx(idf_b * 2 * 2.2 / (2 + norm[1]))),
    ]
    assert [text for text, _ in index("b", 1)] == ["b b c d"]
    assert index("e", 5) == []


def test_a_corpus_is_lines_of_json_or_paragraphs(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"title": "T", "text": "x"}\n{"contents": "y"}\n{"text": "z"}\n')
    (tmp_path / "a.txt").write_text("one\nmore\n\n \ntwo\n")
    assert read_corpus(tmp_path / "a.jsonl") == ["T\nx", "y", "z"]
    assert read_corpus(tmp_path / "a.txt") == ["one\nmore", "two"]
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"body": "x"}\n')
    with pytest.raises(ValueError, match="b.jsonl, line 2: needs 'contents'"):
        read_corpus(tmp_path / "b.jsonl")


def test_a_model_searches_by_its_tags(server):
    environment = ToolEnvironment([SearchTool(server, top_k=2)], format=TagFormat("search", "query"), describe="none")
    row = {"messages": [{"role": "user", "content": "Who wrote the first program?"}]}
    turn = {"role": "assistant", "content": "<search>who wrote a program</search>"}
    result = environment.step([*row["messages"], turn], row)
    assert result.messages[0]["content"] == (
        "<information>[1] Ada Lovelace\nwrote the first program\n[2] Grace Hopper\nwrote a compiler</information>"
    )
    assert result.counts == {"tool_calls": 1, "tool_errors": 0}


def test_nothing_found_is_said(server):
    assert SearchTool(server)({"query": "zebra"}) == "Nothing was found."


def test_bare_documents_are_understood_too(fake_service):
    service = fake_service(lambda payload, headers: (200, {"result": [[{"contents": "a"}, {"document": "b"}]]}))
    assert SearchTool(service.url)({"query": "x"}) == "[1] a\n[2] b"
    assert service.payloads == [{"queries": ["x"], "topk": 3, "return_scores": True}]


def test_a_service_that_is_down_or_odd_is_told_to_the_model(fake_service):
    service = fake_service(lambda payload, headers: (200, {"hits": []}))
    with pytest.raises(ServiceError, match="answered without a result"):
        SearchTool(service.url)({"query": "x"})
    service.down()
    environment = ToolEnvironment([SearchTool(service.url, retries=1, backoff=0.01)])
    row = {"messages": [{"role": "user", "content": "?"}]}
    call = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    result = environment.step([*row["messages"], {"role": "assistant", "content": call}], row)
    assert "gave no answer in 2 attempts" in result.messages[0]["content"]
    assert result.counts["tool_errors/raised"] == 1


def test_the_server_refuses_what_is_no_request(server):
    request = urllib.request.Request(server, data=b'{"query": "x"}')
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        urllib.request.urlopen(request, timeout=10)
    with refused.value as answer:
        assert "queries" in json.loads(answer.read())["error"]


def test_the_server_is_a_command(tmp_path):
    (tmp_path / "corpus.txt").write_text("\n\n".join(DOCUMENTS))
    command = [sys.executable, "-m", "rl2lightning.environments.search_server"]
    arguments = ["--corpus", str(tmp_path / "corpus.txt"), "--port", "0"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline()
        assert line.startswith("3 documents at http://127.0.0.1:")
        assert SearchTool(line.split()[-1], top_k=1)({"query": "Turing"}) == "[1] Alan Turing\nbroke a code"
    finally:
        process.terminate()
        process.wait(10)
        process.stdout.close()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.txt", None, "No such file"),
        ("empty.txt", "\n\n", "empty.txt holds no documents"),
        ("rows.jsonl", '{"text": "a"}\n\n{"title": "b"}', "line 3: needs 'contents', or 'text'"),
        ("rows.jsonl", "text", "line 1 is no JSON"),
        ("rows.jsonl", '{"text": null}', "line 1: 'contents', 'title' and 'text' must be strings"),
        ("latin.txt", b"caf\xe9", "latin.txt is no text in UTF-8"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong_with_a_corpus(tmp_path, monkeypatch, capsys, name, content, said):
    if content is not None:
        (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.setattr(sys, "argv", ["search_server", "--corpus", str(tmp_path / name), "--port", "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert said in capsys.readouterr().err.splitlines()[-1]


def test_the_command_names_an_address_that_it_cannot_listen_at(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.setattr(sys, "argv", ["search_server", "--corpus", str(tmp_path / "a.txt"), "--port", "70000"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "cannot listen at --host 127.0.0.1 --port 70000" in capsys.readouterr().err


def test_a_line_of_a_corpus_ends_where_its_line_does(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"contents": "a\u2028b"}\r\n{"title": "c", "text": "d"}\n{"contents": ""}')
    assert read_corpus(tmp_path / "a.jsonl") == ["a\u2028b", "c\nd", ""]


def test_at_least_one_passage_is_asked_for():
    with pytest.raises(ValueError, match="top_k=0 must be at least 1"):
        SearchTool("http://127.0.0.1:1/", top_k=0)
