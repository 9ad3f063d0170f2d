"""Labelled answers: what a row may look like, what is dropped, what is refused."""

import json

import pytest
import torch

from rl2lightning.data import PreferenceDataModule, UnpairedDataModule
from rl2lightning.data.chat import encode_chat


def write_rows(tmp_path, rows):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "rows.jsonl")


def set_up(module, trainer):
    module.trainer = trainer
    module.setup("fit")
    return module


def row(prompt, completion, label, **more):
    return {"messages": prompt, "completion": completion, "label": label, **more}


def conversation(prompt, reply):
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]


def test_a_batch_holds_each_answer_with_its_label(tmp_path, make_trainer, chatml):
    rows = [
        row("a", "good", True, answer="x"),
        row([{"role": "user", "content": "b"}], [{"role": "assistant", "content": "bad"}], False, answer="y"),
        row("c", conversation("c", "whole"), True, answer="z"),
    ]
    module = set_up(UnpairedDataModule(write_rows(tmp_path, rows), val_ratio=0, batch_size=3, seed=0), make_trainer())
    (batch,) = module.train_dataloader()
    seqs = batch.sequences
    lengths = seqs.lengths.tolist()
    encoded = [encode_chat(chatml, conversation(*turns))[0] for turns in (("a", "good"), ("b", "bad"), ("c", "whole"))]
    ours = zip(seqs.input_ids.split(lengths), seqs.action_mask.split(lengths), seqs.labels.tolist(), strict=True)
    expected = [(*one, label) for one, label in zip(encoded, (True, False, True), strict=True)]
    assert sorted((ids.tolist(), mask.tolist(), label) for ids, mask, label in ours) == sorted(expected)
    assert sorted(r["answer"] for r in batch.rows) == ["x", "y", "z"]
    assert {len(r["messages"]) for r in batch.rows} == {1}  # prompts, to sample completions for
    assert batch.num_dropped == 0


def test_ones_and_zeros_are_labels_and_what_a_batch_calls_them_is_true_and_false(tmp_path, make_trainer):
    rows = [row(prompt, "b", label) for prompt, label in (("a", 1), ("b", 0), ("c", 0))]
    module = set_up(UnpairedDataModule(write_rows(tmp_path, rows), val_ratio=0, batch_size=3), make_trainer())
    (batch,) = module.train_dataloader()
    assert batch.sequences.labels.dtype == torch.bool
    assert {r["messages"][0]["content"]: r["label"] for r in batch.rows} == {"a": True, "b": False, "c": False}
    assert all(isinstance(r["label"], bool) for r in batch.rows)
    assert [r["label"] for r in batch.rows] == batch.sequences.labels.tolist()


def test_empty_and_cut_off_answers_are_dropped_and_counted(tmp_path, make_trainer, chatml):
    long = "x" * 40
    rows = [row("a", "b", True), row("a", " ", False), row("a", "", True), row(long, "b", False), row("a", long, False)]
    module = UnpairedDataModule(write_rows(tmp_path, rows), val_ratio=0, batch_size=5, max_length=40)
    (batch,) = set_up(module, make_trainer()).train_dataloader()
    assert batch.num_dropped == 3
    assert sorted(zip(batch.sequences.lengths.tolist(), batch.sequences.truncated.tolist(), strict=True)) == [
        (len(encode_chat(chatml, conversation("a", "b"))[0][0]), False),
        (40, True),
    ]
    assert len(batch.rows) == 5


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"messages": "a", "completion": "b"}, r"row 1 of .*: no 'label' .* set data\.label_key"),
        (row("a", "b", None), r"row 1 of .*: 'label' is null"),
        (row("a", "b", 2), "row 1 of .*: 'label' must be true .desirable. or false, or 1 or 0, not 2; write it so, or"),
        (row("a", "b", -1), "row 1 of .*: 'label' must be true .desirable. or false, or 1 or 0, not -1"),
        (row("a", "b", 1.0), "row 1 of .*: 'label' must be true .desirable. or false, or 1 or 0, not 1.0"),
        (row("a", "b", "true"), "row 1 of .*: 'label' must be .* not 'true'; .* set data.label_key to the column"),
        (
            row(conversation("a", "b"), "c", True),
            "row 1 of .*: the prompt must end with a user, tool .* as column 'messages' does; .* data.messages_key",
        ),
        (
            row(conversation("a", "b"), conversation("a", "b"), True),
            "row 1 of .*: the prompt must end with a user, tool",
        ),
        (row("a", None, True), r"row 1 of .*: 'completion' is null .* set data\.completion_key"),
        ({"completion": "b", "label": True}, r"row 1 of .*: no 'messages'"),
        (row("a", [{"role": "user", "content": "b"}], True), "'completion' must end with an assistant turn"),
    ],
)
def test_a_row_without_what_is_needed_is_named(tmp_path, make_trainer, bad, message):
    path = tmp_path / "rows.py"
    path.write_text(f"def train():\n    return [{row('a', 'b', True)!r}, {bad!r}]\n")
    with pytest.raises(ValueError, match=message):
        set_up(UnpairedDataModule(str(path), val_ratio=0), make_trainer())


@pytest.mark.parametrize(("label", "name"), [(True, "true"), (False, "false"), (0, "0")])
def test_answers_of_one_kind_are_refused(tmp_path, make_trainer, label, name):
    rows = [row("a", str(i), label) for i in range(3)]
    with pytest.raises(ValueError, match=f"'label' is {name} in all 3 training rows of .* both kinds"):
        set_up(UnpairedDataModule(write_rows(tmp_path, rows), val_ratio=0), make_trainer())


def test_other_columns_can_be_named(tmp_path, make_trainer):
    rows = [{"q": "a", "a": "b", "good": i == 0} for i in range(2)]
    keys = {"messages_key": "q", "completion_key": "a", "label_key": "good"}
    module = set_up(UnpairedDataModule(write_rows(tmp_path, rows), val_ratio=0, batch_size=2, **keys), make_trainer())
    (batch,) = module.train_dataloader()
    assert sorted(batch.sequences.labels.tolist()) == [False, True]


def test_reading_ahead_shows_every_row_once_on_any_number_of_ranks_and_moves_nothing(tmp_path, make_trainer):
    pairs = [{"messages": f"{i}", "chosen": "yes", "rejected": "no", "margin": i} for i in range(10)]
    path = write_rows(tmp_path, pairs)
    for size in (1, 3):
        seen = {True: [], False: []}
        for rank in range(size):
            data = PreferenceDataModule(path, val_ratio=0.3, batch_size=2)
            set_up(data, make_trainer(rank=rank, size=size))
            for training in seen:
                loaders = data.read_ahead(training=training)
                assert [len(loader) for loader in loaders] == [1] * (1 + training)
                seen[training] += [r["messages"][0]["content"] for loader in loaders for b in loader for r in b.rows]
            assert data.position.step == 0
        assert sorted(seen[True]) == [str(i) for i in range(10)]
        assert sorted(seen[False]) == sorted(str(i) for i in data.val_split.indices)
