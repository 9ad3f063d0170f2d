"""The tool quickstart learns to call its tool: what is stated here was measured with room to spare."""

import csv
import sys
from pathlib import Path

import pytest

from rl2lightning.cli import CLI

REPO = Path(__file__).parents[2]


def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, list[float]]:
    """Fits the tool quickstart from the repository's root; each metric's values."""
    monkeypatch.chdir(REPO)
    monkeypatch.setattr(sys, "argv", ["rl2lightning"])
    quiet = ["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(tmp_path)]
    CLI(args=["fit", "--config", "configs/quickstart/tools.yaml", *quiet, *arguments])
    with (tmp_path / "version_0/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows if row[name]] for name in rows[0]}


def test_12_steps_teach_to_call_the_tool(monkeypatch, tmp_path) -> None:
    metrics = fit(monkeypatch, tmp_path, "--trainer.max_steps", "12", "--trainer.num_sanity_val_steps", "0")
    rewards, calls = metrics["rollout/reward"], metrics["rollout/tool_calls"]
    assert rewards[0] < 0.35
    assert calls[0] < 0.5
    assert calls[-1] > 0.8
    assert rewards[-1] > 0.6  # 0.80 when it was measured
    assert max(metrics["train/mismatch_max"]) < 1e-3  # also across turns engine and trainer agree on every log-prob
    assert metrics["rollout/environment_errors"][-1] == 0


@pytest.mark.slow
def test_success_rises_from_below_0_3_to_above_0_9(monkeypatch, tmp_path) -> None:
    metrics = fit(monkeypatch, tmp_path)
    greedy, sampled = metrics["val/accuracy"], metrics["rollout/reward"]
    assert greedy[0] < 0.3
    assert greedy[-1] > 0.9  # 1.0 when it was measured
    assert sampled[0] < 0.3
    assert sum(sampled[-10:]) / 10 > 0.8
