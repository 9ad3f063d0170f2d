import json

import datasets
import pytest
import torch
from datasets.packaged_modules.json.json import JsonConfig

from rl2lightning.data.sources import Source, load_rows, require, split_rows

ROWS = [{"messages": f"question {i}", "answer": str(i)} for i in range(4)]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture(rows, indices, seed=0):
    return rows.mixture(indices, torch.Generator().manual_seed(seed))


def test_every_format_reads_the_same_rows(tmp_path):
    table = datasets.Dataset.from_list(ROWS)
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.json").write_text(json.dumps(ROWS))
    table.to_csv(tmp_path / "rows.csv")
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=table, test=table.select([2])).save_to_disk(tmp_path / "saved_splits")
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", ROWS)
    write_jsonl(tmp_path / "files" / "test.jsonl", ROWS[2:3])
    (tmp_path / "rows.py").write_text(f"def train():\n    return {ROWS}\n\ndef second():\n    return {ROWS[1:2]}\n")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    names = ["rows.jsonl", "rows.json", "rows.parquet", "rows.py", "saved", "saved_splits", "files", arrow]
    for name in names:
        assert list(load_rows(str(tmp_path / name))) == ROWS
    # a csv file knows no types: numbers come as numbers
    assert list(load_rows(str(tmp_path / "rows.csv"))) == [{**row, "answer": int(row["answer"])} for row in ROWS]
    assert list(load_rows(f"test@{tmp_path}/saved_splits")) == ROWS[2:3]
    assert list(load_rows(f"test@{tmp_path}/files")) == ROWS[2:3]
    assert list(load_rows(f"train[1:3]@{tmp_path}/rows.jsonl")) == ROWS[1:3]
    assert list(load_rows(f"second@{tmp_path}/rows.py")) == ROWS[1:2]


def test_an_at_sign_further_down_the_path_is_part_of_it(tmp_path):
    (tmp_path / "user@host").mkdir()
    assert list(load_rows(write_jsonl(tmp_path / "user@host" / "rows.jsonl", ROWS))) == ROWS


def test_nested_values_keep_the_keys_they_have_and_no_others(tmp_path):
    calls = [{"arguments": {"city": "x"}}, {"arguments": {"count": 3}}]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"tool_calls": [call]} for call in calls])
    assert [row["tool_calls"] for row in load_rows(path)] == [[call] for call in calls]


# strings that are JSON, and one that looks like a time
TEXTS = ["86", "true", "null", "[1]", '"q"', '{"a": 1}', "plain", "2020-01-01"]


@pytest.mark.parametrize(
    "rows",
    [
        [{"chosen": x} for x in [*TEXTS, [{"role": "assistant", "content": "86"}], None, 86]],
        [{"messages": [{"role": "user", "content": x}]} for x in [*TEXTS, ["a part"]]],
        [{"calls": [{"arguments": x}]} for x in [{"city": "86"}, {"count": 86}, *TEXTS]],
        [{"answer": "2020-01-01", "others": ["2020-01-01 10:00:00", None]}] * 3,
    ],
)
def test_strings_stay_strings_whatever_else_their_column_holds(tmp_path, rows):
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "files").mkdir()
    write_jsonl(tmp_path / "files" / "train.jsonl", rows)
    write_jsonl(tmp_path / "files" / "test.jsonl", rows[::-1])
    assert list(load_rows(path)) == list(load_rows(f"{tmp_path}/rows.json")) == rows
    assert list(load_rows(f"train[1:3]@{path}")) == rows[1:3]
    assert list(load_rows(f"train[:2]+test[1:]@{tmp_path}/files")) == rows[:2] + rows[::-1][1:]
    write_jsonl(tmp_path / "rows.jsonl", rows[:0:-1])
    assert list(load_rows(path)) == rows[:0:-1]  # a changed file is read anew


@pytest.mark.parametrize(
    ("first", "later", "change"),
    [
        ({"a": "86"}, {"a": [{"role": "user"}]}, r"Column\(/a\) changed from string to array"),
        ({"a": [{"b": "86"}]}, {"a": [{"b": 86}]}, r"Column\(/a/\[\]/b\) changed from string to number"),
    ],
)
def test_a_column_that_mixes_types_only_later_is_refused(tmp_path, monkeypatch, first, later, change):
    monkeypatch.setattr("rl2lightning.data.tables._START", 10_000)
    init = JsonConfig.__init__
    monkeypatch.setattr(
        JsonConfig, "__init__", lambda self, *args, **kw: init(self, *args, **{"chunksize": 10_000, **kw})
    )
    padding = [{**first, "text": "x" * 1000}] * 20
    assert list(load_rows(write_jsonl(tmp_path / "pure.jsonl", padding))) == padding
    with pytest.raises(ValueError, match=f"a column of '.*mixed.jsonl' mixes types beyond .*: {change}; write all"):
        load_rows(write_jsonl(tmp_path / "mixed.jsonl", [*padding, {**first, "text": ""}, {**later, "text": ""}]))


def test_only_files_that_mix_types_are_read_twice(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "mixed.jsonl", [{"a": "86"}, {"a": [86]}])
    load_rows(path)
    monkeypatch.setattr("rl2lightning.data.tables._objects", None)
    load_rows(write_jsonl(tmp_path / "rows.jsonl", ROWS))
    assert list(load_rows(path)) == [{"a": "86"}, {"a": [86]}]  # from the cache


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{dir}/none.jsonl", "data file '{dir}/none.jsonl' does not exist"),
        ("{dir}/none.py", "data file '{dir}/none.py' does not exist"),
        ("{dir}/none", "data path '{dir}/none' does not exist"),
        ("{dir}/notes.txt", "unknown extension '.txt': use one of .json, .jsonl, .csv, .parquet, .arrow, .py"),
        ("{dir}/empty.jsonl", "data set '{dir}/empty.jsonl' is empty"),
        ("{dir}/empty.json", "data set '{dir}/empty.json' is empty"),
        ("test@{dir}/rows.jsonl", 'Unknown split "test"'),
        ("test@{dir}/splits", "has no split 'test': it has train"),
        ("test@{dir}/saved", "was saved without splits: drop 'test@'"),
        ("{dir}/broken.jsonl", "cannot read data set '{dir}/broken.jsonl'"),
        ("{dir}/rows.py", "no function 'train': write function@rows.py, of number, nothing, numbers"),
        ("{dir}/raises.py", "data.path='{dir}/raises.py' could not be imported: NameError"),
        ("number@{dir}/rows.py", "number in '{dir}/rows.py' must return a list of rows, not int"),
        ("nothing@{dir}/rows.py", "data set 'nothing@{dir}/rows.py' is empty"),
        ("numbers@{dir}/rows.py", "row 0 from numbers in '{dir}/rows.py' must be a dict, not int"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, path, message):
    write_jsonl(tmp_path / "rows.jsonl", ROWS)
    for name, text in (("notes.txt", "x"), ("empty.jsonl", ""), ("empty.json", "[]"), ("broken.jsonl", "{bad")):
        (tmp_path / name).write_text(text)
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(tmp_path / "splits")
    (tmp_path / "raises.py").write_text("undefined")
    (tmp_path / "rows.py").write_text(
        "def number(): return 3\ndef nothing(): return []\ndef numbers(): return [3]\ndef _hidden(): return []\n"
    )
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the message is compared whole below)
        load_rows(path.format(dir=tmp_path))
    assert message.format(dir=tmp_path) in str(error.value)


def test_a_hub_name_without_network_says_so(monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="'nobody/nothing:main' is no local path and the Hugging Face hub was not"):
        load_rows("nobody/nothing:main")


def test_a_hub_name_may_carry_a_configuration(monkeypatch):
    asked, table = [], datasets.Dataset.from_list(ROWS)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: asked.append((args, kwargs)) or table)
    load_rows(["test@owner/name:main", "owner/name"])
    assert asked == [
        (("owner/name",), {"split": "test", "name": "main"}),
        (("owner/name",), {"split": "train", "name": None}),
    ]


def test_a_missing_key_is_named_with_the_keys_there_are():
    assert require({"answer": 0}, "answer", "data.answer_key") == 0
    with pytest.raises(ValueError, match=r"no 'answer' \(the row's keys: messages\); set data.answer_key"):
        require({"messages": "a"}, "answer", "data.answer_key")
    with pytest.raises(
        ValueError, match=r"^'answer' is null or missing \(the row's keys: messages\); .* or set data.answer_key"
    ):
        require({"messages": "a", "answer": None}, "answer", "data.answer_key")


def test_rows_of_several_sources_lie_end_to_end_and_know_where_they_are_from(tmp_path):
    first, second = write_jsonl(tmp_path / "a.jsonl", ROWS[:3]), write_jsonl(tmp_path / "b.jsonl", ROWS[3:])
    rows = load_rows([first, Source(second)])
    assert [rows[i] for i in range(4)] == list(rows) == ROWS
    assert rows.where(2) == f"row 2 of {first}"
    assert rows.where(3) == f"row 0 of {second}"
    with pytest.raises(IndexError):
        rows[4]


def test_a_mixture_scales_each_source_by_its_weight(tmp_path):
    first = write_jsonl(tmp_path / "a.jsonl", [{"x": i} for i in range(4)])
    second = write_jsonl(tmp_path / "b.jsonl", [{"x": i} for i in range(6)])
    rows = load_rows([Source(first, 2.5), Source(second, 0.5)])
    mixed = mixture(rows, list(range(10)))
    counts = [mixed.count(i) for i in range(10)]
    assert sorted(counts[:4]) == [2, 2, 3, 3]  # 4 * 2.5 = 10 rows
    assert sorted(counts[4:]) == [0, 0, 0, 1, 1, 1]  # 6 * 0.5 = 3 rows
    assert mixture(rows, list(range(10))) == mixed
    other = mixture(rows, list(range(10)), seed=1)
    assert other != mixed
    assert len(other) == len(mixed)
    assert mixture(load_rows([first, second]), [1, 5, 7]) == [1, 5, 7]  # weight 1 is every row once


def test_bad_weights_are_refused(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ROWS)
    with pytest.raises(ValueError, match=r"weight=0 of source 'a' must be positive"):
        Source("a", 0)
    with pytest.raises(ValueError, match=r"weight=0.1 of source .* leaves none of its 4 rows"):
        mixture(load_rows(Source(path, 0.1)), [0, 1, 2, 3])
    with pytest.raises(ValueError, match="list of data sources is empty"):
        load_rows([])


def test_the_held_out_split_is_a_seeded_partition():
    train, val = split_rows(100, 0.05, seed=3)
    assert len(val) == 5
    assert sorted(train + val) == list(range(100))
    assert split_rows(100, 0.05, seed=3) == (train, val)
    assert split_rows(100, 0.05, seed=4)[1] != val
    assert split_rows(10, 0.0, seed=0) == (list(range(10)), [])
    assert len(split_rows(10, 0.01, seed=0)[1]) == 1  # a ratio above 0 holds something out
    with pytest.raises(ValueError, match=r"val_ratio=1 must lie in \[0, 1\)"):
        split_rows(10, 1, seed=0)
    with pytest.raises(ValueError, match="val_ratio=0.5 leaves none of 1 rows to train on"):
        split_rows(1, 0.5, seed=0)
