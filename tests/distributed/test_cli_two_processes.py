"""Two real processes through the command line: refills, several updates, saved rollouts, then predictions."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., Path]


@pytest.fixture(scope="module")
def run(run_on: Callable[..., None]) -> Run:
    """Runs the quickstart with changes; its run directory."""

    def run(world_size: int, verb: str, root: Path, *arguments: str) -> Path:
        settings = ["--trainer.default_root_dir", str(root), "--trainer.enable_progress_bar", "false"]
        settings += ["--trainer.strategy.timeout_seconds", "60"]
        run_on(
            world_size, "-m", "rl2lightning", verb, "--config", "configs/quickstart/grpo.yaml", *settings, *arguments
        )
        return max(root.glob("version_*"), key=lambda p: int(p.name[8:]))

    return run


SETTINGS = [
    "--data.prompts_per_rollout=5",  # not a multiple of the processes, and the last validation batch is uneven too
    "--data.val_ratio=0.0007",
    "--data.val_batch_size=3",
    "--model.samples_per_prompt=4",
    "--model.updates_per_rollout=2",
    "--trainer.max_steps=4",
    "--trainer.val_check_interval=4",
    "--trainer.num_sanity_val_steps=0",
    "--samples.save_rollouts=true",
]


@pytest.fixture(scope="module")
def runs(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    config = tmp_path_factory.mktemp("config") / "dynamic.yaml"
    config.write_text(
        "trainer:\n  callbacks:\n    - class_path: rl2lightning.RolloutCallback\n      init_args:\n"
        "        environment: configs/quickstart/arithmetic.py\n        dynamic_sampling: true\n"
        "    - class_path: lightning.pytorch.callbacks.ModelCheckpoint\n      init_args: {save_last: true}\n"
    )
    arguments = ["--config", str(config), *SETTINGS]
    return {n: run(n, "fit", tmp_path_factory.mktemp(f"run{n}"), *arguments) for n in (1, 2)}


def metrics(directory: Path, name: str) -> list[float]:
    with (directory / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def test_refills_and_several_updates_do_not_depend_on_the_number_of_processes(runs: dict[int, Path]) -> None:
    one, two = runs[1], runs[2]
    assert sum(metrics(one, "rollout/filtered_groups")) > 0  # otherwise nothing was refilled
    for name in ("rollout/reward", "rollout/filtered_groups", "val/accuracy"):
        assert metrics(two, name) == metrics(one, name), name
    for name in ("train/grad_norm", "train/loss"):
        assert metrics(two, name) == pytest.approx(metrics(one, name), rel=1e-4, abs=1e-6), name


def test_every_process_saves_its_rollouts(runs: dict[int, Path]) -> None:
    def saved(directory: Path, kind: str) -> list:
        lines = [line for file in directory.glob(f"rollouts/{kind}-*.jsonl") for line in file.read_text().splitlines()]
        return sorted((r["group_id"], r["sample_id"], r["messages"][-1]["content"]) for r in map(json.loads, lines))

    assert saved(runs[2], "train") == saved(runs[1], "train")
    assert len(saved(runs[2], "val")) == 7


def test_predictions_of_two_processes_are_in_one_file(run: Run, runs: dict[int, Path], tmp_path: Path) -> None:
    checkpoint = runs[2] / "checkpoints/last.ckpt"
    data = ["--data.val_ratio=0.0007", "--data.val_batch_size=3"]
    directory = run(2, "predict", tmp_path, *data, "--ckpt_path", str(checkpoint))
    records = [json.loads(line) for line in (directory / "completions.jsonl").read_text().splitlines()]
    assert sorted(r["group_id"] for r in records) == list(range(7))
