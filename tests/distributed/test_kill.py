"""`kill -9` at random moments of a run under torchrun: what is left is complete, and the run goes on from it."""

import csv
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rl2lightning.parallel import checkpoint as ckpt

INHERITED = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "PL_GLOBAL_SEED"}


def start(model: str, task: str, root: Path, *more: str) -> subprocess.Popen[str]:
    """SFT on two processes, with a checkpoint at every step, always in the same directory."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "model": "rl2lightning.SFT",
        "model.model": model,
        "model.optimizer": "{lr: 1.0e-3, schedule: constant, warmup_ratio: 0.0}",
        "data": "rl2lightning.ChatDataModule",
        "data.path": f"conversations@{task}",
        "data.batch_size": "8",
        "data.val_ratio": "0.0",
        "trainer.accelerator": "cpu",
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": str(root),
        "trainer.strategy.timeout_seconds": "60",
        "ckpt_path": "last",
    }
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}", "-m", "rl2lightning"]
    environment = {k: v for k, v in os.environ.items() if k not in INHERITED} | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *launcher, "fit", *(f"--{name}={value}" for name, value in settings.items()), *more],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def saving(directory: Path, *, background: bool) -> list[str]:
    return [
        f"--trainer.strategy.async_checkpoints={str(background).lower()}",
        "--trainer.callbacks+=ModelCheckpoint",
        f"--trainer.callbacks.dirpath={directory}",
        "--trainer.callbacks.every_n_train_steps=1",
        f"--trainer.callbacks.save_last={'link' if background else 'true'}",
    ]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def step_of(path: Path | None) -> int:
    return 0 if path is None else ckpt.read_meta(path)["global_step"]


def check_all(directory: Path) -> int:
    """Every checkpoint under its name can be read to the last weight; the step of the newest."""
    for path in directory.glob("*.ckpt"):
        assert path.exists(), f"{path} points nowhere"
        ckpt.check(path)
        assert all(bool(torch.isfinite(x).all()) for x in ckpt.load_full_weights(path, "policy.lm.").values())
    return step_of(ckpt.newest([directory]))


def kill_after_some_steps(process: subprocess.Popen[str], directory: Path, already: int, rng: random.Random) -> bool:
    """Kills all processes, or one of the two that train, at some moment after new checkpoints; whether it was all."""
    deadline = time.monotonic() + 120
    newest = directory / "last.ckpt" / "meta.pt"
    seen: set[int] = set()
    while len(seen) < rng.choice((2, 3, 4)):
        assert process.poll() is None, process.stdout.read()[-4000:]  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        try:
            step = torch.load(newest, weights_only=True)["global_step"]
        except OSError:  # just being replaced
            continue
        if step > already:
            seen.add(step)
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    workers = children(process.pid)
    if everyone := rng.random() < 0.6:
        os.kill(process.pid, signal.SIGKILL)
    for pid in workers if everyone else [rng.choice(workers)]:
        os.kill(pid, signal.SIGKILL)
    return everyone


def rows(root: Path) -> dict[str, dict[int, str]]:
    """Losses as they were written, by run and step."""
    found: dict[str, dict[int, str]] = {}
    for path in sorted(root.glob("version_*/metrics.csv")):
        with path.open() as file:
            found[path.parent.name] = {
                int(row["step"]): row["train/loss"] for row in csv.DictReader(file) if row["train/loss"]
            }
    return found


@pytest.mark.parametrize("rounds", [3, pytest.param(30, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_from_a_complete_checkpoint(
    tiny_model: str, task: str, tmp_path: Path, rounds: int
) -> None:
    root, directory = tmp_path / "runs", tmp_path / "checkpoints"
    rng = random.Random(rounds)
    reached = 0
    for number in range(rounds):
        process = start(
            tiny_model, task, root, *saving(directory, background=number % 2 == 0), "--trainer.max_steps=100000"
        )
        try:
            everyone = kill_after_some_steps(process, directory, reached, rng)
            output = process.communicate(timeout=60)[0]  # where one was killed, the other ends within a minute
        finally:
            process.kill()
        assert everyone or "Signal 9 (SIGKILL)" in output, output[-4000:]
        before, reached = reached, check_all(directory)
        assert reached > before
        if before:
            assert f"step={before}.ckpt" in output or "last.ckpt" in output
            first = min(rows(root)[f"version_{number}"], default=before)
            assert first == before  # the first step after the checkpoint, counted from 0
    last = start(tiny_model, task, root, *saving(directory, background=True), f"--trainer.max_steps={reached + 3}")
    output = last.communicate(timeout=120)[0]
    assert last.returncode == 0, output[-4000:]
    assert check_all(directory) == reached + 3
    assert not [p.name for p in directory.iterdir() if p.suffix != ".ckpt"]  # nothing half done is left

    whole = tmp_path / "whole"
    process = start(tiny_model, task, whole, f"--trainer.max_steps={reached + 3}")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output[-4000:]
    uninterrupted = rows(whole)["version_0"]
    assert len(uninterrupted) == len(set(uninterrupted.values())) == reached + 3
    for run in rows(root).values():
        assert run.items() <= uninterrupted.items()  # every digit
    theirs = ckpt.load_full_weights(ckpt.newest([whole / "version_0/checkpoints"]), "policy.lm.")
    for name, x in ckpt.load_full_weights(ckpt.newest([directory]), "policy.lm.").items():
        assert torch.equal(x, theirs[name]), name
