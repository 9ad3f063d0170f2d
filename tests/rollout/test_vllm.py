"""vLLM, really run: numbers against plain forwards, and what it may not do to its process."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.types import SamplingParams

pytestmark = pytest.mark.vllm

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 128, "max_position_embeddings": 256}


def random_model(kind: str, seed: int = 0):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        config, cls = Qwen3MoeConfig(**SMALL, **experts, tie_word_embeddings=False), Qwen3MoeForCausalLM
    else:
        config, cls = Qwen3Config(**SMALL, tie_word_embeddings=kind == "tied"), Qwen3ForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() >= 2:
                p.mul_(5.0)
    return model.eval().requires_grad_(False)


def perturb(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)


def largest_gap(engine: VLLMEngine, model, processed, seed: int = 0) -> float:
    prompts = [[3 + (7 * i + 11 * j) % 90 for j in range(4 + i)] for i in range(12)]
    completions = engine.generate(prompts, SamplingParams(max_tokens=40), range(seed, seed + 12))
    gaps = [processed(model, c.prompt_ids, c.token_ids) - torch.tensor(c.logps) for c in completions]
    return float(torch.cat(gaps).abs().max())


@pytest.fixture
def start(tmp_path):
    """Starts an engine on a model's config; ended after the test."""
    engines: list[VLLMEngine] = []

    def make(model, dtype: torch.dtype = torch.float32, **settings) -> VLLMEngine:
        model.config.save_pretrained(tmp_path)
        engine = VLLMEngine(**{"kv_cache_memory_bytes": 32 << 20, **settings})
        engine.start(EngineSpec(str(tmp_path), "cpu", dtype))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.shutdown()


@pytest.mark.parametrize("kind", ["tied", "untied", "moe"])
def test_logps_are_the_models_after_each_of_three_pushes(start, processed, kind):
    model = random_model(kind)
    engine = start(model)
    for push in range(3):
        engine.update_weights(model.named_parameters(), version=push)
        assert largest_gap(engine, model, processed, seed=push) <= 2e-5
        perturb(model, push)
    assert largest_gap(engine, model, processed) > 1e-2  # the measure sees a push that was left out


def test_bfloat16_weights_are_those_of_the_rounded_model(start, processed):
    model = random_model("untied")
    engine = start(model, torch.bfloat16)
    engine.update_weights(((name, p.bfloat16()) for name, p in model.named_parameters()), version=0)
    (completion,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=100), [0])
    gap = processed(model, completion.prompt_ids, completion.token_ids) - torch.tensor(completion.logps)
    assert 1e-4 < gap.abs().mean() < 0.15  # the threshold of the callback's check


def test_building_and_generating_leave_the_process_as_it_was(start):
    model = random_model("tied")
    environment, threads, set_threads = dict(os.environ), torch.get_num_threads(), torch.set_num_threads
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    expected = torch.rand(3), np.random.rand(3).tolist(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    engine = start(model)
    engine.update_weights(model.named_parameters(), version=0)
    engine.generate([[5, 6]] * 4, SamplingParams(max_tokens=8), range(4))
    assert torch.equal(torch.rand(3), expected[0])
    assert (np.random.rand(3).tolist(), random.random()) == expected[1:]
    assert dict(os.environ) == environment
    assert torch.get_num_threads() == threads
    assert torch.set_num_threads is set_threads
    engine.shutdown()
    assert not dist.is_initialized()  # the group that it made for itself went with it


def test_sleep_does_nothing_on_the_cpu(start, processed):
    model = random_model("tied")
    engine = start(model)
    engine.update_weights(model.named_parameters(), version=7)
    engine.sleep()
    assert engine.version == 7  # the weights are still there
    engine.wake()
    assert largest_gap(engine, model, processed) <= 2e-5


def test_a_shared_prompt_is_read_once(start):
    model = random_model("tied")
    engine = start(model, max_num_seqs=1, options={"block_size": 32})
    engine.update_weights(model.named_parameters(), version=0)
    cached: list[int] = []
    step = engine._step

    def look():
        outputs = step()
        cached.extend(o.num_cached_tokens for o in outputs if o.finished)
        return outputs

    engine._step = look
    engine.generate([list(range(3, 99))] * 3, SamplingParams(max_tokens=2), range(3))
    assert cached == [0, 64, 64]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor": 0}, "tensor=0"),
        ({"kv_cache_memory_bytes": 0}, "kv_cache_memory_bytes=0"),
        ({"max_num_seqs": 0}, "max_num_seqs=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        VLLMEngine(**settings)


def test_a_length_beyond_the_models_is_refused(start):
    with pytest.raises(ValueError, match="max_model_len=300 exceeds the 256 positions"):
        start(random_model("tied"), max_model_len=300)


# -- two processes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", [1, 2])
def test_two_processes_generate_alone_and_together(tensor: int, tmp_path: Path):
    """The checks are in vllm_cases.py; they run on every process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = str(Path(__file__).with_name("vllm_cases.py"))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    inherited = {"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"}
    environment = {k: v for k, v in os.environ.items() if k not in inherited} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, script, str(tensor), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("all checks passed") == 2
