"""What the learning tests share: a run of a config by the command line, and what it logged."""

import csv
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rl2lightning.cli import CLI

REPO = Path(__file__).parents[2]
Logged = dict[str, list[float]]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Logged]:
    """Fits a config of the repository, named without `configs/` and suffix; the values of its metrics.csv by name."""

    def run(config: str, *arguments: str) -> Logged:
        monkeypatch.chdir(REPO)
        monkeypatch.setattr(sys, "argv", ["rl2lightning"])
        root = tmp_path / config
        quiet = ["--trainer.enable_progress_bar", "false", "--trainer.default_root_dir", str(root)]
        CLI(args=["fit", "--config", f"configs/{config}.yaml", *quiet, *arguments])
        logged: Logged = {}
        with max(root.glob("version_*/metrics.csv")).open() as file:
            for row in csv.DictReader(file):
                for name, value in row.items():
                    if value:
                        logged.setdefault(name, []).append(float(value))
        return logged

    return run
