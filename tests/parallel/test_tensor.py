"""What tensor parallelism makes of Hugging Face's plans, and what it refuses; its numbers are tests/distributed's."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from rl2lightning.models.build import build_causal_lm
from rl2lightning.parallel.tensor import apply_tensor_parallel, tensor_plan
from rl2lightning.parallel.tensor_layers import Whole, become

SMALL = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "pad_token_id": 0,
}
FAMILIES = ["Qwen2", "Qwen3", "Llama", "Mistral", "Gemma2", "Gemma3Text", "Phi3", "Olmo2"]


def config(family: str = "Qwen3", **changes: Any) -> Any:
    return getattr(transformers, f"{family}Config")(**{**SMALL, **changes})


class Two:
    """As much of a mesh as is asked before anything is cut."""

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_plan_of_every_family_speaks_of_all_its_matrices(family: str, tied: bool) -> None:
    settings = config(family, tie_word_embeddings=tied)
    plan = tensor_plan(settings, 2)
    layer = build_causal_lm(settings, torch.float32).base_model.layers[0]
    matrices = {f"layers.*.{name}" for name, m in layer.named_modules() if isinstance(m, nn.Linear)}
    assert matrices
    assert matrices <= set(plan)
    inside_attention = {f"layers.*.{name}" for name, m in layer.named_modules() if name.endswith(("q_norm", "k_norm"))}
    assert set(plan) == matrices | inside_attention


@pytest.mark.parametrize(
    ("changes", "size", "number"),
    [
        ({}, 8, "num_attention_heads=12"),
        (
            {"num_key_value_heads": 4},
            6,
            "num_key_value_heads=4",
        ),  # divides the heads, but neither 4 nor a multiple of 4
        ({"intermediate_size": 50}, 4, "intermediate_size=50"),
        ({"vocab_size": 5}, 4, "vocab_size=5"),  # 2 + 2 + 1 + none
    ],
)
def test_numbers_that_do_not_fit_are_named(changes: dict[str, Any], size: int, number: str) -> None:
    with pytest.raises(ValueError, match=rf"{number} does not fit strategy\.tensor={size}"):
        tensor_plan(config(**changes), size)


@pytest.mark.parametrize(("key_heads", "size"), [(4, 2), (4, 4), (1, 4), (2, 4), (6, 3), (3, 6)])
def test_key_heads_are_shared_out_or_repeated(key_heads: int, size: int) -> None:
    assert tensor_plan(config(num_key_value_heads=key_heads), size)["layers.*.self_attn.k_proj"] == "colwise"


def test_gathered_keys_need_not_fit() -> None:
    # whole heads are put together again before anything looks at them
    plan = tensor_plan(config("Olmo2", num_key_value_heads=4), 6)
    assert plan["layers.*.self_attn.k_proj"] == "colwise_gather_output"


def test_a_family_without_a_plan_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'gpt2' models have no tensor-parallel plan: set strategy\.tensor=2 to 1"):
        tensor_plan(transformers.GPT2Config(), 2)


def test_a_plan_with_an_unknown_entry_is_refused() -> None:
    with pytest.raises(ValueError, match=r"plan of 'qwen3_moe' models asks for \w+, .* set strategy\.tensor=2 to 1"):
        tensor_plan(transformers.Qwen3MoeConfig(), 2)


@pytest.mark.parametrize("changes", [{"attention_dropout": 0.1}, {"resid_pdrop": 0.1}])
def test_dropout_is_refused(changes: dict[str, float]) -> None:
    lm = build_causal_lm(config("Phi3", **changes), torch.float32)
    with pytest.raises(ValueError, match=r"dropout \(0\.1\) needs strategy\.tensor=1"):
        apply_tensor_parallel(lm, Two())  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["self_attn", "mlp", "root"])
def test_parameters_that_the_plan_does_not_speak_of_are_refused(where: str) -> None:
    lm = build_causal_lm(config(), torch.float32)
    layer = lm.base_model.layers[0]
    if where == "root":
        lm.base_model.router = nn.Linear(96, 4, device="meta")  # a matrix on the stream between the layers
        name = "router"
    else:
        getattr(layer, where).sinks = nn.Module()
        getattr(layer, where).sinks.weight = nn.Parameter(torch.zeros(4))
        name = f"layers\\.0\\.{where}\\.sinks"
    with pytest.raises(
        ValueError, match=rf"Qwen3ForCausalLM has parameters in '{name}' .* set strategy\.tensor=2 to 1"
    ):
        apply_tensor_parallel(lm, Two())  # type: ignore[arg-type]


def test_a_module_keeps_its_own_class_behind_the_new_one() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)  # type: ignore[misc]

    layer = nn.Linear(2, 2)
    x = torch.randn(3, 2)
    before = layer(x)
    become(layer, Twice)
    assert isinstance(layer, nn.Linear)
    torch.testing.assert_close(layer(x), 2 * before)


def test_layers_of_a_kind_are_of_one_class_so_that_blocks_share_what_is_compiled() -> None:
    first, second, norm = nn.Linear(2, 2), nn.Linear(2, 2), nn.RMSNorm(2)
    for layer in (first, second, norm):
        become(layer, Whole)
    assert type(first) is type(second) is not type(norm)
