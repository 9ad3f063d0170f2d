"""vLLM with an adapter beside frozen weights, really run, against plain forwards of the merged model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.rollout.vllm_backend import weights
from rl2lightning.types import SamplingParams

pytestmark = pytest.mark.vllm
RANK, ALPHA = 4, 8
MATRICES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONFIG = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "target_modules": MATRICES}
PROMPTS = [[3 + (7 * i + 11 * j) % 90 for j in range(40 + i)] for i in range(8)]  # long enough for a cached prefix


def frozen_model():
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() >= 2:
                p.mul_(5.0)
    return model.eval().requires_grad_(False)


def adapter(model, seed: int) -> tuple[dict[str, Tensor], nn.Module]:
    """A random adapter under the names of peft's files, and the model with it."""
    generator = torch.Generator().manual_seed(seed)
    weights, merged = {}, copy.deepcopy(model)
    for name, module in merged.model.named_modules():
        if isinstance(module, nn.Linear):
            down = 0.3 * torch.randn(RANK, module.in_features, generator=generator)
            up = 0.3 * torch.randn(module.out_features, RANK, generator=generator)
            weights[f"base_model.model.model.{name}.lora_A.weight"] = down
            weights[f"base_model.model.model.{name}.lora_B.weight"] = up
            module.weight += ALPHA / RANK * up @ down
    return weights, merged


def test_logps_are_those_of_the_adapted_model_after_each_push(tmp_path: Path, processed) -> None:
    model = frozen_model()
    model.config.save_pretrained(tmp_path)
    engine = VLLMEngine(kv_cache_memory_bytes=32 << 20, lora="adapter", options={"block_size": 32})
    engine.start(EngineSpec(str(tmp_path), "cpu", torch.float32, adapter_rank=RANK))
    reads = 0

    def base():
        nonlocal reads
        reads += 1
        yield from model.named_parameters()

    def largest_gap(expected: nn.Module) -> float:
        completions = engine.generate(PROMPTS, SamplingParams(max_tokens=20), range(len(PROMPTS)))
        gaps = [processed(expected, c.prompt_ids, c.token_ids) - torch.tensor(c.logps) for c in completions]
        return float(torch.cat(gaps).abs().max())

    try:
        for push in range(3):
            weights, merged = adapter(model, push)
            engine.update_adapter(base(), CONFIG, weights.items(), push)
            assert engine.version == push
            engine.wake()
            assert largest_gap(merged) <= 5e-5  # the second time from a cached prefix
            assert largest_gap(merged) <= 5e-5
            engine.sleep()
        engine.wake()
        assert largest_gap(model) > 1e-1  # the measure sees an adapter that was left out
        assert reads == 1
        files = engine._adapter.directory  # type: ignore[union-attr]
        assert files.is_dir()
    finally:
        engine.shutdown()
    assert not files.exists()


def test_what_an_engine_cannot_do_with_adapters_is_refused(tmp_path: Path) -> None:
    frozen_model().config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lora='adapter' needs adapters: set model\.init_args\.lora"):
        VLLMEngine(lora="adapter").start(EngineSpec(str(tmp_path), "cpu", torch.float32))
    with pytest.raises(ValueError, match="adapters up to rank 512, not 600"):
        VLLMEngine(lora="adapter").start(EngineSpec(str(tmp_path), "cpu", torch.float32, adapter_rank=600))


def test_layers_stand_bare_while_frozen_weights_are_loaded_and_are_wrapped_again_after_an_error(tmp_path: Path) -> None:
    model = frozen_model()
    model.config.save_pretrained(tmp_path)
    engine = VLLMEngine(kv_cache_memory_bytes=32 << 20, lora="adapter", options={"block_size": 32})
    engine.start(EngineSpec(str(tmp_path), "cpu", torch.float32, adapter_rank=RANK))
    from vllm.lora.layers import BaseLayerWithLoRA

    served = weights._model(engine._llm)

    def wrapped() -> list[str]:
        return [name for name, x in served.named_modules() if isinstance(x, BaseLayerWithLoRA)]

    before, seen = {name: served.get_submodule(name) for name in wrapped()}, []

    def base():
        seen.append(wrapped())
        yield from list(model.named_parameters())[:3]
        raise OSError("of the stream's")

    with pytest.raises(OSError, match="stream"):
        engine.update_adapter(base(), CONFIG, iter(()), version=0)
    assert len(before) >= 8
    assert seen == [[]]
    assert {name: served.get_submodule(name) for name in wrapped()} == before
    engine.shutdown()
