"""vLLM, really run: numbers against plain forwards, and what it may not do to its process."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rl2lightning.rollout.auto import default_engine
from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutLoop
from rl2lightning.rollout.partial import PartialRollouts
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.rollout.vllm_backend import llm, process
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


class Starter:
    """Starts engines on a model's config. A process can have one at a time; the last is kept for who wants the same."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.key: tuple | None = None
        self.engine: VLLMEngine | None = None

    def __call__(self, model, dtype: torch.dtype = torch.float32, **settings) -> VLLMEngine:
        key = (str(model.config), dtype, str(settings))
        if self.engine is None or self.key != key or self.engine.running_on is None:
            self.end()
            model.config.save_pretrained(self.directory)
            self.engine, self.key = VLLMEngine(**{"kv_cache_memory_bytes": 32 << 20, **settings}), key
            self.engine.start(EngineSpec(str(self.directory), "cpu", dtype))
        return self.engine

    def end(self) -> None:
        if self.engine is not None:
            self.engine.shutdown()
            self.engine = None


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Starter]:
    starter = Starter(tmp_path_factory.mktemp("model"))
    yield starter
    starter.end()


@pytest.fixture
def tied(start) -> VLLMEngine:
    return start(random_model("tied"), options={"block_size": 32})


@pytest.mark.parametrize("kind", ["untied", "moe", "tied"])
def test_logps_are_the_models_after_each_of_three_pushes(request, start, processed, kind):
    model = random_model(kind)
    engine = request.getfixturevalue("tied") if kind == "tied" else start(model)
    for push in range(3):
        engine.update_weights(model.named_parameters(), version=push)
        assert largest_gap(engine, model, processed, seed=push) <= 2e-5
        perturb(model, push)
    assert largest_gap(engine, model, processed) > 1e-2  # the measure sees a push that was left out


def test_sleep_does_nothing_on_the_cpu(tied, processed):
    model = random_model("tied")
    tied.update_weights(model.named_parameters(), version=7)
    tied.sleep()
    assert tied.version == 7  # the weights are still there
    tied.wake()
    assert largest_gap(tied, model, processed) <= 2e-5


def test_a_shared_prompt_is_read_once(tied, monkeypatch):
    tied.update_weights(random_model("tied").named_parameters(), version=0)
    cached: list[int] = []
    core = tied._llm.llm_engine.engine_core
    get_output = core.get_output

    def look():
        outputs = get_output()
        cached.extend(o.prefill_stats.num_cached_tokens for o in outputs.outputs if o.prefill_stats is not None)
        return outputs

    monkeypatch.setattr(core, "get_output", look)
    for seed in range(3):
        tied.generate([list(range(3, 99))], SamplingParams(max_tokens=2), [seed])
    assert cached == [0, 64, 64]


def test_stop_tokens_stay_a_set_to_look_up_in():
    params = llm.request_params(SamplingParams(), max_tokens=2, stop_token_ids=(5, 2), seed=0)
    stops = params.clone().stop_token_ids  # as vLLM does with each request's
    assert stops == [5, 2]
    assert 5 in stops
    list.clear(stops)
    assert 5 in stops  # not by going through the list


def test_a_rollout_in_pieces_has_the_logps_of_the_weights_that_drew_each_token(tied, processed, tokenizer):
    old, new = random_model("tied"), random_model("tied", seed=1)
    loop = RolloutLoop(tied, tokenizer, apply_chat_template=False)
    sampling = SamplingParams(max_tokens=30, temperature=0.7, stop_token_ids=tuple(range(30)))
    jobs = [
        Job({"messages": [{"role": "user", "content": "abc"}]}, group_id=i, sample_id=k)
        for i in range(4)
        for k in (0, 1)
    ]
    tied.update_weights(old.named_parameters(), version=0)
    first = loop.run(jobs, sampling, 7, partial=PartialRollouts(share=0.3, max_age=9))
    tied.update_weights(new.named_parameters(), version=2)
    second = loop.run([], sampling, 7, carried=first.carried)
    assert len(first.trajectories) + len(second.trajectories) == 8
    resumed = 0
    for t in (*first.trajectories, *second.trajectories):
        begin = t.action_mask.index(True)
        prompt, actions, versions = t.token_ids[:begin], t.token_ids[begin:], t.weight_versions[begin:]
        both = (processed(model, prompt, actions, temperature=0.7) for model in (old, new))
        expected = torch.where(torch.tensor(versions) == 2, *reversed(list(both)))
        torch.testing.assert_close(torch.tensor(t.logps[begin:]), expected, atol=2e-5, rtol=0)
        resumed += set(versions) == {0, 2}
    assert resumed


def test_bfloat16_weights_are_those_of_the_rounded_model(start, processed):
    model = random_model("untied")
    engine = start(model, torch.bfloat16)
    engine.update_weights(((name, p.bfloat16()) for name, p in model.named_parameters()), version=0)
    (completion,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=100), [0])
    gap = processed(model, completion.prompt_ids, completion.token_ids) - torch.tensor(completion.logps)
    assert 1e-4 < gap.abs().mean() < 0.15  # the threshold of the callback's check


def test_building_and_generating_leave_the_process_as_it_was(start):
    start.end()
    model, grouped = random_model("tied"), dist.is_initialized()
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
    assert dist.is_initialized() == grouped  # a group that it made for itself went with it


def test_a_model_without_a_kernel_is_refused_before_it_is_loaded(tmp_path):
    from transformers import Qwen3Config

    Qwen3Config(**{**SMALL, "head_dim": 16}).save_pretrained(tmp_path)
    engine = VLLMEngine()
    with pytest.raises(ValueError, match=r"heads of 32, 64, .* this model's have 16; use rl2lightning\.HFEngine"):
        engine.start(EngineSpec(str(tmp_path), "cpu", torch.float32))
    assert engine.running_on is None


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


def test_two_processes_generate_alone_and_together(run_on, tmp_path: Path):
    """The checks are in vllm_cases.py; they run on every process, with an engine each and with one for both."""
    run_on(2, Path(__file__).with_name("vllm_cases.py"), tmp_path, timeout=400)


def test_blocks_of_64_tokens_are_a_default_on_gpus_and_no_choice():
    from vllm.config.cache import CacheConfig

    with process.larger_blocks(torch.device("cuda")):
        ours, theirs = CacheConfig(), CacheConfig(block_size=32)
        assert (ours.block_size, ours.user_specified_block_size) == (64, False)
        assert (theirs.block_size, theirs.user_specified_block_size) == (32, True)
    with process.larger_blocks(torch.device("cpu")):
        assert CacheConfig().block_size == 16
    assert CacheConfig().block_size == 16


def test_a_model_that_vllm_would_borrow_from_transformers_stays_the_trainers(tmp_path: Path):
    from transformers import AutoModelForCausalLM, GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=128, hidden_size=64, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    config.architectures = ["GPTNeoXForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="vLLM has no GPTNeoXForCausalLM of its own .*; use rl2lightning.HFEngine"):
        VLLMEngine().start(EngineSpec(str(tmp_path), torch.device("cpu"), torch.float32, (1,)))
    engine, why = default_engine("cpu", str(tmp_path))
    assert type(engine) is HFEngine
    assert why.startswith("rollouts by the embedded engine: vLLM has no GPTNeoXForCausalLM")
    AutoModelForCausalLM.from_config(config)  # the class is as it was
