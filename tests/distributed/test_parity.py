"""Every family on every mesh against plain Hugging Face models in float64: loss, gradients, clipping, weights.

Bounds are for float32: the loss within 2e-6, of every parameter the largest gap of its gradient within 5e-6 of its
largest entry. See `parity_cases.py` for what is compared.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import parity_cases as cases
import pytest
import torch

SCRIPT = Path(__file__).with_name("parity_cases.py")

RUNS = [
    (world, f"{mesh}-{family}")
    for world, meshes in cases.MESHES.items()
    for mesh, (_, families) in meshes.items()
    for family in families
]
STEPS = [(world, run, kind) for world, run in RUNS for kind in cases.KINDS]
STEPS += [
    (world, run, kind)
    for world, run in RUNS
    for kind in cases.SCALAR_KINDS
    if run.rpartition("-")[2] in cases.SCALAR_FAMILIES
]
ADAPTED = [(world, run) for world, run in RUNS if run.rpartition("-")[2] in cases.ADAPTED_FAMILIES]
STEPS += [(world, run, kind) for world, run in ADAPTED for kind in cases.ADAPTED_KINDS]
SAVED = [(world, run) for world, run in RUNS if run.rpartition("-")[2] in cases.SCALAR_FAMILIES]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    for family in cases.FAMILIES:
        cases.write_reference(family, directory / family)
    return directory


class Outcomes:
    """What came out of all runs of a world size, in one group of real processes, when it is first asked for."""

    def __init__(self, run_on: Callable[..., None], models: Path) -> None:
        self.run_on, self.models, self.by_world = run_on, models, {}

    def __getitem__(self, world: int) -> dict[str, Any]:
        if world not in self.by_world:
            out = self.models / f"{world}.pt"
            self.run_on(world, SCRIPT, self.models, out, timeout=900)
            self.by_world[world] = torch.load(out, weights_only=True)
        return self.by_world[world]


@pytest.fixture(scope="session")
def outcomes(run_on: Callable[..., None], models: Path) -> Outcomes:
    return Outcomes(run_on, models)


@pytest.mark.parametrize(("world", "run", "kind"), STEPS)
def test_a_step_has_the_loss_and_the_clipped_gradients_of_plain_models(
    outcomes: Outcomes, world: int, run: str, kind: str
) -> None:
    outcome = outcomes[world][run][kind]
    assert outcome["every_parameter"]
    assert outcome["loss"] <= 2e-6
    assert outcome["gradient"] <= 5e-6, outcome["worst"]
    assert outcome["norm"] <= 5e-6


@pytest.mark.parametrize(("world", "run"), RUNS)
def test_the_kinds_of_step_are_what_they_are_called(outcomes: Outcomes, world: int, run: str) -> None:
    outcome = outcomes[world][run]
    passes = {kind: outcome[kind]["block_passes"] for kind in cases.KINDS}
    assert passes["packed"] == 1
    assert passes["checkpointing_full"] == passes["checkpointing_selective"] == 2
    tokens = outcome["micro_batches"]["micro_batch_tokens"]
    assert passes["micro_batches"] == len(tokens) >= 2
    assert len(set(tokens)) >= 2


@pytest.mark.parametrize(("world", "run"), RUNS)
def test_weights_are_those_of_the_file_or_of_one_draw_bit_for_bit(outcomes: Outcomes, world: int, run: str) -> None:
    outcome = outcomes[world][run]["weights"]
    assert outcome["names"]
    assert outcome["not_as_stored"] == []
    assert outcome["not_as_drawn"] == []
    mesh, family = run.rsplit("-", 1)
    assert outcome["tied"] is cases.FAMILIES[family][1].get("tie_word_embeddings", False)
    mesh = cases.MESHES[world][mesh][0]
    parts = mesh.shard * mesh.context * mesh.tensor
    # uneven cuts and, under tensor parallelism, norms and keys of too few heads are in more places than one
    assert outcome["share"] < 1.5 / parts


@pytest.mark.parametrize("model", ["Parity", "ScalarParity"])
@pytest.mark.parametrize(("world", "run"), SAVED)
def test_one_process_reads_a_checkpoint_of_any_mesh_bit_for_bit(
    outcomes: Outcomes, world: int, run: str, model: str
) -> None:
    assert outcomes[world][run][f"{model}_not_as_saved"] == []


@pytest.mark.parametrize(("world", "run"), ADAPTED)
def test_adapters_are_switched_off_merged_and_saved_on_any_mesh(outcomes: Outcomes, world: int, run: str) -> None:
    outcome = outcomes[world][run]["adapted"]
    assert outcome["frozen"] <= 2e-6  # log-probs of the reference against those of the model without adapters
    assert outcome["merged_names"]
    assert outcome["merged"] <= 1e-6  # of weights of about 0.1
    assert outcome["not_as_saved"] == []
    assert outcome["not_as_drawn"] == []
