"""What tests share that start processes of their own: a free port, a clean environment, a small run to start."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

# other tests of this process have left a process group behind, and its address in the environment
INHERITED = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED"}


@pytest.fixture
def free_port() -> Callable[[], int]:
    def find() -> int:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            return free.getsockname()[1]

    return find


@pytest.fixture
def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in INHERITED} | {"OMP_NUM_THREADS": "1"}


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
