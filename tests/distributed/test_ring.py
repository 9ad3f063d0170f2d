"""Attention spread over 2 and 4 processes is that of the plain formula, by every transport and layout."""

from pathlib import Path

import pytest
import torch

CASES = [
    "one_odd",
    "several_odd",
    "multi_head",
    "multi_query",
    "whole_and_cut",
    "all_whole",
    "many_short",
    "ranks_without_rows",
    "softcap",
    "window",
    "window_and_softcap",
    "padded_rows",
    "one_head_at_a_time",
    "two_heads_then_one",
]


@pytest.fixture(scope="module", params=[2, 4])
def outcomes(run_on, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The errors of all cases on so many processes."""
    out = tmp_path_factory.mktemp("ring") / "outcomes.pt"
    run_on(request.param, Path(__file__).with_name("ring_cases.py"), out)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("transport", ["ring", "gather"])
@pytest.mark.parametrize("case", CASES)
def test_a_ring_attends_as_one_process(outcomes: dict, case: str, transport: str) -> None:
    for name, error in outcomes[f"{case}/{transport}/float64"].items():
        assert error < 5e-15, name
    for name, error in outcomes[f"{case}/{transport}/float32"].items():
        assert error < 2e-6, name


def test_every_case_is_looked_at(outcomes: dict) -> None:
    assert {name.partition("/")[0] for name in outcomes} == {*CASES, "model", "package"}


def test_the_package_attends_as_one_process_to_the_precision_of_bf16(outcomes: dict) -> None:
    for name, error in outcomes["package"].items():
        assert error < 2e-2, name


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_policy_over_a_ring_has_the_log_probs_and_gradient_of_one_process(outcomes: dict, checkpointing: str) -> None:
    assert outcomes["model"][f"{checkpointing}/logps"] < 2e-6
    assert outcomes["model"][f"{checkpointing}/gradient"] < 5e-6


def test_selective_checkpointing_runs_the_ring_once_a_layer(outcomes: dict) -> None:
    # two layers; full checkpointing attends once more in the backward pass
    calls = {name: outcomes["model"][f"{name}/calls"] for name in ("none", "full", "selective")}
    assert calls == {"none": 2, "full": 4, "selective": 2}


def test_reverting_the_plugin_restores_what_was(outcomes: dict) -> None:
    assert outcomes["model"]["reverted"] == 1
    assert outcomes["model"]["reverted/gradient"] == 0
