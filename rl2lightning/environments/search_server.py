"""A small retrieval service over a text file, ranked by BM25: for trying out `SearchTool` without another service.

    python -m rl2lightning.environments.search_server --corpus texts.jsonl --port 8000

A `.jsonl` file has {"title", "text"} or {"contents"} a line; of any other file each paragraph is a document. All of it
is held in memory. It trusts whoever can reach it, and listens on this machine only unless told otherwise.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


class BM25:
    """Okapi BM25 (Robertson and Zaragoza, 2009), idf = ln(1 + (N − n + ½) / (n + ½)), which is never negative.

    Args:
        documents: their texts; words are runs of letters and digits, without regard to case.
        k1: how fast a word's count saturates.
        b: how much long documents are held back.
    """

    def __init__(self, documents: Sequence[str], *, k1: float = 1.2, b: float = 0.75) -> None:
        self.documents = list(documents)
        counts = [Counter(_words(text)) for text in self.documents]
        lengths = [sum(count.values()) for count in counts]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        holding: dict[str, list[int]] = defaultdict(list)
        for i, count in enumerate(counts):
            for word in count:
                holding[word].append(i)
        self._weights: dict[str, list[tuple[int, float]]] = {}  # word -> (document, its part of the score)
        for word, where in holding.items():
            idf = math.log(1 + (len(counts) - len(where) + 0.5) / (len(where) + 0.5))
            self._weights[word] = [
                (i, idf * counts[i][word] * (k1 + 1) / (counts[i][word] + k1 * (1 - b + b * lengths[i] / mean)))
                for i in where
            ]

    def __call__(self, query: str, top_k: int) -> list[tuple[str, float]]:
        """The best documents with their scores, best first; only those that share a word with the query."""
        scores: dict[int, float] = defaultdict(float)
        for word in _words(query):
            for i, weight in self._weights.get(word, ()):
                scores[i] += weight
        best = sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:top_k]
        return [(self.documents[i], score) for i, score in best]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def read_corpus(path: str | Path) -> list[str]:
    """The documents of a file."""
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}") from error
    if Path(path).suffix != ".jsonl":
        return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    lines = enumerate(text.split("\n"), start=1)  # not splitlines: other ends of lines may stand in a JSON string
    return [_document(line, f"{path}, line {number}") for number, line in lines if line.strip()]


def _document(line: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict) or ("contents" not in row and "text" not in row):
        raise ValueError(f"{where}: needs 'contents', or 'text' and perhaps 'title'")
    parts = [row["contents"]] if "contents" in row else [row.get("title") or "", row["text"]]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError(f"{where}: 'contents', 'title' and 'text' must be strings")
    return "\n".join(filter(None, parts))


def serve(index: BM25, *, host: str = "127.0.0.1", port: int = 0) -> ThreadingHTTPServer:
    """A server for any path; `serve_forever` runs it. Port 0 takes a free one: see `server_address`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                queries, top_k = request["queries"], int(request.get("topk") or 3)
                hits = [index(str(query), top_k) for query in queries]
            except (ValueError, KeyError, TypeError) as error:
                return self._answer(400, {"error": f"{type(error).__name__}: {error}"})
            if request.get("return_scores"):
                result: list[Any] = [[{"document": {"contents": d}, "score": s} for d, s in found] for found in hits]
            else:
                result = [[{"contents": document} for document, _ in found] for found in hits]
            return self._answer(200, {"result": result})

        def _answer(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return ThreadingHTTPServer((host, port), Handler)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rl2lightning.environments.search_server",
        description="A small retrieval service over a text file, ranked by BM25, for rl2lightning's SearchTool.",
    )
    parser.add_argument(
        "--corpus",
        required=True,
        help="a .jsonl file with {'title', 'text'} or {'contents'} a line, or a text whose paragraphs are documents",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; by default this machine alone")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    arguments = parser.parse_args()
    try:
        documents = read_corpus(arguments.corpus)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not documents:
        parser.error(f"{arguments.corpus} holds no documents")
    index = BM25(documents)
    try:
        server = serve(index, host=arguments.host, port=arguments.port)
    except (OSError, OverflowError) as error:
        parser.error(f"cannot listen at --host {arguments.host} --port {arguments.port}: {error}")
    print(
        f"{len(index.documents)} documents at http://{arguments.host}:{server.server_address[1]}/retrieve", flush=True
    )
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()


if __name__ == "__main__":
    main()
