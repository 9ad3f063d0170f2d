"""Options of the strategy that change no number on one process change none where a model is spread over two, either."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

MESHES = ["tensor", "tensor_sequence", "context"]


@pytest.fixture(scope="module")
def weights(run_on, make_model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, torch.Tensor]]:
    """Of all cases; with more blocks than torch.compile would compile one by one."""
    out = tmp_path_factory.mktemp("weights") / "weights.pt"
    run_on(2, Path(__file__).with_name("options_cases.py"), make_model(num_hidden_layers=9), out)
    return torch.load(out, weights_only=True)


@pytest.mark.parametrize("mesh", MESHES)
def test_parameters_in_host_memory_change_no_bit(weights: dict, mesh: str) -> None:
    ours, plain = weights[f"{mesh}/cpu_offload"], weights[f"{mesh}/plain"]
    assert {name for name, x in plain.items() if not torch.equal(ours[name], x)} == set()


@pytest.mark.parametrize("mesh", MESHES)
def test_blocks_are_compiled_once_and_agree_to_rounding(weights: dict, mesh: str) -> None:
    for name, x in weights[f"{mesh}/plain"].items():
        torch.testing.assert_close(weights[f"{mesh}/compile"][name], x, rtol=1e-3, atol=1e-4)
