"""Loss, gradient and weights do not depend on micro-batches, packing or the number of processes (fp32, 1e-5)."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CASES = [
    "sft",
    "sft_small_micro_batches",
    "sft_sequence",
    "sft_fewer_sequences_than_ranks",
    "sft_three_steps",
    "grpo_token",
    "grpo_sequence",
    "grpo_constant",
]


def run_cases(world_size: int, model: str, out: Path) -> dict:
    """All cases in one group of real processes; the outcome of rank 0."""
    script = str(Path(__file__).with_name("cases.py"))
    # other tests of this process have left a process group behind, and its address in the environment
    inherited = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"}
    environment = {k: v for k, v in os.environ.items() if k not in inherited} | {"OMP_NUM_THREADS": "1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", f"--nproc-per-node={world_size}", f"--master-port={port}"]
    command = [sys.executable, *(launcher if world_size > 1 else []), script, model, str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return torch.load(out, weights_only=True)


@pytest.fixture(scope="module")
def outcomes(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    directory = tmp_path_factory.mktemp("outcomes")
    return {n: run_cases(n, tiny_model, directory / f"{n}.pt") for n in (1, 2, 4)}


def largest_difference(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Largest difference of any parameter, relative to that parameter's largest entry."""
    assert ours.keys() == reference.keys()
    return max(float((ours[n] - x).abs().max() / x.abs().max().clamp(min=1e-12)) for n, x in reference.items())


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_processes_do_not_change_loss_and_gradient(outcomes: dict, case: str, world_size: int) -> None:
    one, many = outcomes[1][case], outcomes[world_size][case]
    assert largest_difference(many["gradients"], one["gradients"]) < 1e-5
    torch.testing.assert_close(many["metrics"]["train/loss"], one["metrics"]["train/loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(many["metrics"]["train/grad_norm"], one["metrics"]["train/grad_norm"], rtol=1e-5, atol=0)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_micro_batches_do_not_change_the_gradient(outcomes: dict, world_size: int) -> None:
    # 32 tokens a micro-batch against all in one; on 4 processes 8 sequences leave some micro-batches empty
    small, whole = outcomes[world_size]["sft_small_micro_batches"], outcomes[1]["sft"]
    assert largest_difference(small["gradients"], whole["gradients"]) < 1e-5


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_do_not_change_the_gradient(outcomes: dict, world_size: int) -> None:
    assert (
        largest_difference(outcomes[world_size]["sft_replicated"]["gradients"], outcomes[1]["sft"]["gradients"]) < 1e-5
    )


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("mesh", ["", "_tensor", "_tensor_sequence", "_context"])
def test_three_steps_lead_to_the_same_weights(outcomes: dict, mesh: str, world_size: int) -> None:
    # four processes are two of the named axis and two that shard
    ours, reference = outcomes[world_size][f"sft_three_steps{mesh}"], outcomes[1]["sft_three_steps"]
    assert largest_difference(ours["weights"], reference["weights"]) < 1e-4
