"""A run that was interrupted equals one that was not: to the last bit on the same processes, to 1e-6 on others."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl2lightning.parallel import checkpoint as ckpt

# a checkpoint in the middle of the first epoch, in a later one, and at the end of one; with two updates per rollout the
# odd ones are between the two
STEPS = {
    "sft": [2, 5, 6],
    "sft_in_background": [5],
    "sft_adapters": [5],
    "rm": [5],
    "dpo_precomputed": [5],
    "dpo_live_tensor": [5],
    "kto": [5],
    "kto_context": [5],
    "grpo": [3, 4, 5],
    "grpo_in_background": [5],
    "ppo": [3],  # four updates per rollout, of which the last is to come
}
# case, step, processes it was saved on, processes it goes on on, and their mesh
MESHES: list[tuple[str, int, int, int, dict[str, int]]] = [
    (case, step, *mesh)  # type: ignore[misc]
    for case, step in (("sft", 5), ("grpo_recorded", 5))
    for mesh in ((1, 2, {}), (2, 1, {}), (2, 2, {"replicate": 2}), (2, 2, {"tensor": 2}), (1, 2, {"context": 2}))
]
MESHES += [("ppo_recorded", 5, 2, 1, {}), ("sft_adapters", 5, 2, 1, {}), ("sft_adapters", 5, 2, 2, {"tensor": 2})]
Run = Callable[[int, Path, list[Any]], Path]


@pytest.fixture(scope="module")
def run_jobs(run_on: Callable[..., None], tiny_model: str, task: str) -> Run:
    """All jobs one after the other in one group of real processes."""

    def run(world_size: int, out: Path, jobs: list[Any]) -> Path:
        run_on(world_size, Path(__file__).with_name("resume_cases.py"), tiny_model, task, out, json.dumps(jobs))
        return out

    return run


def name_of(case: str, step: int, saved_on: int, mesh: dict[str, int]) -> str:
    return "-".join([case, f"{step}", f"from{saved_on}", *(f"{axis}{size}" for axis, size in mesh.items())])


@pytest.fixture(scope="module")
def whole(run_jobs: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Directories of the uninterrupted runs, by number of processes."""
    cases = {2: [*STEPS, "grpo_recorded", "ppo_recorded"], 1: ["sft", "grpo", "grpo_recorded"]}
    jobs = {n: [[case, case, None, {}, save_every(case)] for case in cases[n]] for n in (1, 2)}
    return {n: run_jobs(n, tmp_path_factory.mktemp(f"whole{n}"), jobs[n]) for n in (1, 2)}


def save_every(case: str) -> int:
    """After how many steps: after each where one write may meet the next, elsewhere so that those needed are there."""
    return 1 if case == "sft" or case.endswith("_in_background") else math.gcd(*STEPS.get(case, [5]))


@pytest.fixture(scope="module")
def resumed(run_jobs: Run, whole: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Directories of the runs that go on, by number of processes."""
    jobs: dict[int, list[Any]] = {1: [], 2: [["disk_full", checkpoint(whole[2], "sft", 7)]]}
    for case, steps in STEPS.items():
        for step in steps:
            jobs[2].append([name_of(case, step, 2, {}), case, checkpoint(whole[2], case, step), {}, 1])
    jobs[1] += [[name_of(case, 5, 1, {}), case, checkpoint(whole[1], case, 5), {}, 1] for case in ("sft", "grpo")]
    for case, step, saved_on, goes_on_on, mesh in MESHES:
        job = [name_of(case, step, saved_on, mesh), case, checkpoint(whole[saved_on], case, step), mesh, 1]
        jobs[goes_on_on].append(job)
    return {n: run_jobs(n, tmp_path_factory.mktemp(f"resumed{n}"), jobs[n]) for n in (1, 2)}


def checkpoint(directory: Path, case: str, step: int) -> str:
    return str(directory / f"{case}-checkpoints" / f"step={step}.ckpt")


def records(directory: Path, name: str) -> list[dict[str, Any]]:
    """Of each process."""
    return [json.loads(path.read_text()) for path in sorted(directory.glob(f"{name}.rank*.json"))]


SAME = [(case, step, 2) for case, steps in STEPS.items() for step in steps] + [("sft", 5, 1), ("grpo", 5, 1)]


@pytest.mark.parametrize(("case", "step", "processes"), SAME)
def test_on_the_same_processes_every_bit_is_the_same(whole, resumed, case: str, step: int, processes: int) -> None:
    uninterrupted = records(whole[processes], case)
    went_on = records(resumed[processes], name_of(case, step, processes, {}))
    assert len(uninterrupted) == len(went_on) == processes
    for theirs, ours in zip(uninterrupted, went_on, strict=True):
        assert ours["steps"] == theirs["steps"][step:]
        assert ours["validations"] == [v for v in theirs["validations"] if v[0] > step]
        assert ours["weights"] == theirs["weights"]


def test_the_runs_above_are_about_something(whole) -> None:
    for case in STEPS:
        for rank, record in enumerate(records(whole[2], case)):
            steps = record["steps"]
            assert len(steps) == len({s["train/grad_norm"] for s in steps}) == 8
            assert {s["epoch"] for s in steps} >= {0, 1}
            assert [v[0] for v in record["validations"]] == [2, 4, 6, 8]
            assert len({str(s["drawn"]) for s in steps}) == 8, rank
    first, second = records(whole[2], "grpo")
    assert first["steps"][0]["completions"] != second["steps"][0]["completions"]  # each has its own share
    assert first["steps"][1]["completions"] == []  # the second update of a rollout generates nothing


def test_writing_in_the_background_changes_nothing(whole) -> None:
    for case in ("sft", "grpo"):
        assert records(whole[2], case) == records(whole[2], f"{case}_in_background")


def critic_metrics(step: dict[str, Any]) -> list[str]:
    return [name for name in step if name.startswith("train/critic_")]


@pytest.mark.parametrize(("case", "step", "saved_on", "goes_on_on", "mesh"), MESHES)
def test_another_mesh_goes_on_with_the_same_numbers(
    whole, resumed, case: str, step: int, saved_on: int, goes_on_on: int, mesh: dict[str, int]
) -> None:
    theirs = records(whole[saved_on], case)[0]["steps"][step:]
    name = name_of(case, step, saved_on, mesh)
    ours = records(resumed[goes_on_on], name)[0]["steps"]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert (a["epoch"], a["batch_idx"], a["lr"]) == (b["epoch"], b["batch_idx"], b["lr"])
        for metric in ("train/loss", "train/grad_norm", *(["train/kl"] if "train/kl" in b else []), *critic_metrics(b)):
            assert a[metric] == pytest.approx(b[metric], rel=1e-6, abs=1e-6), metric
    reference = torch.load(whole[saved_on] / f"{case}.pt", weights_only=True)
    for tensor, x in torch.load(resumed[goes_on_on] / f"{name}.pt", weights_only=True).items():
        torch.testing.assert_close(x, reference[tensor], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["disk_full", "disk_full_in_background"])
def test_a_full_disk_on_one_process_is_one_clear_error_on_all(resumed, name: str) -> None:
    directory = resumed[2] / name
    told = [json.loads((directory / f"told.rank{rank}.json").read_text()) for rank in (0, 1)]
    assert told[0] == told[1]
    assert len(told[0]) == 2
    for path, sentence in zip(("new.ckpt", "old.ckpt"), told[0], strict=True):
        assert sentence.startswith(f"checkpoint '{directory / path}' was not written: ")
        assert "File too large" in sentence
        assert sentence.endswith("(process 1)")
    assert json.loads((directory / "left.json").read_text()) == ["old.ckpt"]  # whole, and nothing else
    for path in ("old.ckpt", "new.ckpt"):
        ckpt.check(directory / path)
