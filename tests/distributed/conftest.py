"""What tests share that start processes of their own: a free port, a clean environment, a small run to start."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# other tests of this process have left a process group behind, and its address in the environment
INHERITED = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED"}


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in INHERITED} | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def free_port() -> Callable[[], int]:
    return _free_port


@pytest.fixture
def environment() -> dict[str, str]:
    return _environment()


@pytest.fixture(scope="session")
def run_on() -> Callable[..., None]:
    """Runs a Python program to its end in one group of real processes (one: without torchrun); it must succeed."""

    def run(world_size: int, *program: str | Path, timeout: int = 300) -> None:
        torchrun = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", f"--master-port={_free_port()}"]
        command = [sys.executable, *(torchrun if world_size > 1 else []), *map(str, program)]
        done = subprocess.run(command, cwd=REPO, env=_environment(), capture_output=True, text=True, timeout=timeout)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]

    return run


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
