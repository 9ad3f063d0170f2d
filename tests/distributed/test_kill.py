"""Runs on two processes that are told to stop, or killed: what is left is complete, and the run goes on from it."""

import csv
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from rl2lightning.parallel import checkpoint as ckpt

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(fit_sft, environment: dict[str, str], free_port: Callable[[], int]) -> Start:
    """Starts SFT on two processes, by torchrun or by Lightning, in a process group of their own as from a shell."""

    def popen(root: Path, *more: str, torchrun: bool = True) -> subprocess.Popen[str]:
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        return subprocess.Popen(
            [
                sys.executable,
                *(launcher if torchrun else []),
                *fit_sft(root, "--trainer.devices=2", "--ckpt_path=last", *more),
            ],
            env=environment,
            process_group=0,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return popen


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
def test_a_killed_run_goes_on_from_a_complete_checkpoint(start: Start, tmp_path: Path, rounds: int) -> None:
    root, directory = tmp_path / "runs", tmp_path / "checkpoints"
    rng = random.Random(rounds)
    reached = 0
    for number in range(rounds):
        process = start(root, *saving(directory, background=number % 2 == 0), "--trainer.max_steps=100000")
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
    last = start(root, *saving(directory, background=True), f"--trainer.max_steps={reached + 3}")
    output = last.communicate(timeout=120)[0]
    assert last.returncode == 0, output[-4000:]
    assert check_all(directory) == reached + 3
    assert not [p.name for p in directory.iterdir() if p.suffix != ".ckpt"]  # nothing half done is left

    whole = tmp_path / "whole"
    process = start(whole, f"--trainer.max_steps={reached + 3}")
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0, output[-4000:]
    uninterrupted = rows(whole)["version_0"]
    assert len(uninterrupted) == len(set(uninterrupted.values())) == reached + 3
    for run in rows(root).values():
        assert run.items() <= uninterrupted.items()  # every digit
    theirs = ckpt.load_full_weights(ckpt.newest([whole / "version_0/checkpoints"]), "policy.lm.")
    for name, x in ckpt.load_full_weights(ckpt.newest([directory]), "policy.lm.").items():
        assert torch.equal(x, theirs[name]), name


def reach(process: subprocess.Popen[str], root: Path, step: int) -> None:
    """Returns when the run has come so far."""
    deadline = time.monotonic() + 120
    while not any(max(steps, default=0) >= step for steps in rows(root).values()):
        assert process.poll() is None, process.stdout.read()[-4000:]  # type: ignore[union-attr]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def workers(process: subprocess.Popen[str], torchrun: bool) -> list[int]:
    """The processes that train, by rank."""
    pids = children(process.pid)
    pids = [pid for pid in pids if "fit" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    return pids if torchrun else [process.pid, *pids]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


SIGNALS = {
    "to the second process": (signal.SIGTERM, lambda process, pids: os.kill(pids[1], signal.SIGTERM)),
    "to both, as schedulers do": (signal.SIGTERM, lambda process, pids: [os.kill(pid, signal.SIGTERM) for pid in pids]),
    "to what started them": (signal.SIGTERM, lambda process, pids: os.kill(process.pid, signal.SIGTERM)),
    "Ctrl-C in a shell": (signal.SIGINT, lambda process, pids: os.killpg(process.pid, signal.SIGINT)),
    "Ctrl-C for the second process": (signal.SIGINT, lambda process, pids: os.kill(pids[1], signal.SIGINT)),
}
IN_CI = {(True, "to the second process"), (True, "Ctrl-C in a shell"), (False, "Ctrl-C for the second process")}


@pytest.mark.parametrize(
    ("torchrun", "case"),
    [
        pytest.param(torchrun, case, marks=() if (torchrun, case) in IN_CI else pytest.mark.slow)
        for torchrun in (True, False)
        for case in SIGNALS
    ],
)
def test_a_signal_to_any_process_ends_all_with_a_checkpoint(
    start: Start, tmp_path: Path, torchrun: bool, case: str
) -> None:
    number, send = SIGNALS[case]
    more = ["--trainer.strategy.async_checkpoints=true", "--trainer.max_steps=100000"]
    process = start(tmp_path, *more, torchrun=torchrun)
    try:
        reach(process, tmp_path, 9)  # metrics are written every ten steps
        pids = workers(process, torchrun)
        send(process, pids)
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    path = tmp_path / "version_0/checkpoints/interrupted.ckpt"
    assert f"signal {signal.Signals(number).name}: checkpoint saved to {path}" in output, output[-4000:]
    assert check_all(path.parent) >= 9
    if torchrun:  # which has exit codes of its own and tells those of the processes
        assert process.returncode == 1
        assert f"exitcode  : {128 + number}" in output or "got signal" in output, output[-4000:]
    else:
        assert process.returncode == 128 + number, output[-4000:]
    deadline = time.monotonic() + 20
    while any(running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
