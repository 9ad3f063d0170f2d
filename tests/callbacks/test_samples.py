import json
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rl2lightning import RolloutCallback, Samples
from rl2lightning.callbacks.samples import format_table
from rl2lightning.types import Trajectory


def digits(messages) -> float:
    return float(sum(c.isdigit() for c in messages[-1]["content"]))


def test_a_table_is_as_wide_as_its_cells() -> None:
    rows = [["1+1=", "2"], ["10+10=", "nineteen"]]
    assert format_table(("prompt", "completion"), rows).splitlines() == [
        "prompt  completion",
        "──────  ──────────",
        "1+1=    2",
        "10+10=  nineteen",
    ]


def test_long_texts_are_cut_in_the_middle_and_lines_joined() -> None:
    samples = Samples(max_characters=10)
    assert samples._cut("0123456789") == "0123456789"
    assert samples._cut("0123456789abc") == "01234…9abc"
    t = Trajectory(
        row={"messages": [{"role": "user", "content": "a\nb"}], "answer": 7},
        group_id=0,
        messages=[
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "x"},
            {"role": "tool", "content": "y"},
        ],
        reward=0.12345,
    )
    assert samples._row(t) == ["a⏎b", "x ⏎ y", "7", "0.123"]


def test_validation_shows_as_many_samples_as_asked_for(
    make_trainer, grpo, prompts, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    logger = TensorBoardLogger(tmp_path, name="", version="tb")
    data = prompts(val_ratio=0.2, val_batch_size=2)
    trainer = make_trainer(RolloutCallback(rewards=[digits]), Samples(num_samples=3), logger=logger)
    trainer.validate(grpo(), datamodule=data, verbose=False)
    table = capsys.readouterr().out.partition("step 0: sample completions\n")[2].splitlines()
    held_out = [data.val_split.rows[i] for i in data.val_split.indices[:3]]
    assert table[0].split() == ["prompt", "completion", "answer", "reward"]
    assert [line.split("  ")[0] for line in table[2:5]] == [row["messages"][0]["content"] for row in held_out]
    assert not table[5].strip()
    logger.finalize("success")
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    text = events.Tensors("val/samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert held_out[0]["messages"][0]["content"] in text


def test_samples_of_a_checkpoint_are_those_of_its_step(
    make_trainer, grpo, prompts, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def trainer(**settings):
        return make_trainer(RolloutCallback(rewards=[digits]), Samples(save_rollouts=True), **settings)

    fit = trainer(max_steps=2, limit_val_batches=0)
    fit.fit(grpo(), datamodule=prompts())
    fit.save_checkpoint(tmp_path / "two.ckpt")
    assert fit.lightning_module.weights_step == 2
    capsys.readouterr()
    data = prompts(val_ratio=0.2, prompts_per_rollout=8)  # of which validation has no use
    trainer().validate(grpo(), datamodule=data, ckpt_path=tmp_path / "two.ckpt", verbose=False)
    assert "step 2: sample completions" in capsys.readouterr().out
    assert (tmp_path / "rollouts" / "val-step000002-rank0.jsonl").is_file()


def test_no_samples_no_table(make_trainer, grpo, prompts, capsys: pytest.CaptureFixture) -> None:
    trainer = make_trainer(RolloutCallback(rewards=[digits]), Samples(num_samples=0))
    trainer.validate(grpo(), datamodule=prompts(val_ratio=0.2), verbose=False)
    assert "sample completions" not in capsys.readouterr().out


def test_all_trajectories_can_be_kept_in_files(make_trainer, grpo, prompts, tmp_path: Path) -> None:
    trainer = make_trainer(
        RolloutCallback(rewards=[digits]), Samples(save_rollouts=True), max_steps=2, val_check_interval=2
    )
    trainer.fit(grpo(), datamodule=prompts(val_ratio=0.2))
    files = {p.name: [json.loads(line) for line in p.read_text().splitlines()] for p in tmp_path.glob("rollouts/*")}
    # the sanity check before training is not among them
    assert {name: len(records) for name, records in files.items()} == {
        "train-step000001-rank0.jsonl": 16,
        "train-step000002-rank0.jsonl": 16,
        "val-step000002-rank0.jsonl": 13,
    }
    for records in files.values():
        assert all(r["reward"] == digits(r["messages"]) for r in records)
    assert {r["weight_version"] for r in files["train-step000002-rank0.jsonl"]} == {1}
