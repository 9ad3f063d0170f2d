"""A small run for tests that start processes of their own."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def fit_sft(tiny_model: str, task: str) -> Callable[..., list[str]]:
    """Arguments of the command line for a small SFT run in `root`."""
    settings = {
        "model": "rl2lightning.SFT",
        "model.model": tiny_model,
        "model.optimizer": "{lr: 1.0e-3, schedule: constant, warmup_ratio: 0.0}",
        "data": "rl2lightning.ChatDataModule",
        "data.path": f"conversations@{task}",
        "data.batch_size": "8",
        "data.val_ratio": "0.0",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.strategy.timeout_seconds": "60",
    }

    def arguments(root: Path, *more: str) -> list[str]:
        given = [f"--{name}={value}" for name, value in settings.items()]
        return ["-m", "rl2lightning", "fit", *given, f"--trainer.default_root_dir={root}", *more]

    return arguments
