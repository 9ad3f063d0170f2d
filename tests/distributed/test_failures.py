"""What fails on one process ends the run on all of them, at once and with its cause."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def outcomes(
    run_on: Callable[..., None], tiny_model: str, task: str, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, list]]:
    """How each fit ended, by process."""
    out = tmp_path_factory.mktemp("outcomes")
    run_on(2, Path(__file__).with_name("failure_cases.py"), tiny_model, task, out)
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize(
    ("failure", "message", "steps"),
    [
        ("start", "RolloutError: MemoryError: no room for the weights", 0),
        ("first sleep", "RolloutError: OSError: the cache stays", 0),
        ("first push", "RolloutError: pushed weight '", 0),
        ("second push", "RolloutError: pushed weight '", 1),
        ("offload", "RolloutError: MemoryError: no room on the host", 0),
        ("wake", "RolloutError: MemoryError: no room for the cache", 0),
        ("probe", "RolloutError: OSError: the device fell off", 0),
        ("sleep", "RolloutError: OSError: the cache stays", 0),
        ("reload", "RuntimeError: MemoryError: no room on the device", 0),  # after which there is nothing to be saved
        ("none", "", 2),
    ],
)
def test_what_fails_on_one_process_ends_the_run_on_all(outcomes, failure, message, steps) -> None:
    assert outcomes[0][failure] == outcomes[1][failure]
    said, after, away = outcomes[0][failure]
    assert said.startswith(message)
    assert after == steps
    assert not away


def test_all_processes_go_on_from_the_checkpoint_that_the_first_one_finds(outcomes) -> None:
    assert [process["lagging"] for process in outcomes] == [[3, 2], [3, 2]]


def test_a_process_that_fails_beside_others_in_a_collective_does_not_wait_for_them(outcomes) -> None:
    assert outcomes[1]["unheard"] == "RolloutError: MemoryError: no room for the cache"
    assert outcomes[0]["unheard"]  # as the end of the other process reaches it


@pytest.mark.parametrize("launcher", ["torchrun", "ours"])
def test_what_is_wrong_on_all_processes_is_said_once_and_leaves_no_run(
    fit_sft, launcher: str, tmp_path: Path, free_port, environment
) -> None:
    arguments = fit_sft(tmp_path, "--trainer.devices=2", "--trainer.strategy.tensor=3")
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    command = [sys.executable, *(torchrun if launcher == "torchrun" else []), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.count("rl2lightning: error") == 1
    assert "rl2lightning: error: 2 processes cannot be divided by replicate * context * tensor = 3" in done.stderr
    assert not list(tmp_path.iterdir())
