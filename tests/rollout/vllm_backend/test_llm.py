"""With what vLLM is built; none of it needs vLLM, in whose place a module stands that notes its arguments."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.rollout.vllm_backend import llm

USERS = {"dtype", "disable_log_stats", "use_tqdm_on_load", "enable_chunked_prefill", "max_num_batched_tokens"}


def build(monkeypatch: pytest.MonkeyPatch, **others: Any) -> dict[str, Any]:
    """The arguments that vLLM gets on the CPU."""
    names = ("vllm", "vllm.model_executor", "vllm.model_executor.models", "vllm.model_executor.models.registry")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["vllm"].LLM = dict  # type: ignore[attr-defined]
    modules[names[-1]]._run_in_subprocess = None  # type: ignore[attr-defined]
    settings = llm.Settings("Qwen3ForCausalLM", 2, 64, 8, 1 << 20, True, True, 4, others)
    return llm.build(EngineSpec("directory", torch.device("cpu"), torch.float32, ()), settings)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("tensor_parallel_size", r"options\.tensor_parallel_size=3: set engine\.init_args\.tensor instead"),
        ("enable_sleep_mode", r"set engine\.init_args\.sleep instead"),
        ("enable_lora", r"set engine\.init_args\.lora instead"),
        ("gpu_memory_utilization", r"set engine\.init_args\.kv_cache_memory_bytes instead"),
        ("max_model_len", r"set engine\.init_args\.max_model_len instead"),
        ("seed", r"options\.seed=3: set seed of RolloutCallback, or seed_everything, instead"),
        ("model", r"options\.model=3 is decided by the run; leave it out"),
        ("data_parallel_size_local", r"is decided by the run; leave it out"),
    ],
)
def test_an_option_that_is_not_the_users_to_give_is_refused(option: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        VLLMEngine(options={"block_size": 32, option: 3})


def test_what_the_engine_gives_vllm_is_refused_but_for_what_users_may_know_better(monkeypatch) -> None:
    for name in build(monkeypatch):
        if name in USERS:
            llm.check_options({name: 1})
        else:
            with pytest.raises(ValueError, match=rf"options\.{name}=1"):
                llm.check_options({name: 1})


def test_options_come_after_what_the_engine_gives(monkeypatch) -> None:
    assert build(monkeypatch)["dtype"] == "float32"
    given = build(monkeypatch, dtype="bfloat16", block_size=32)
    assert (given["dtype"], given["block_size"]) == ("bfloat16", 32)


def test_prompts_are_one_piece_on_the_cpu(monkeypatch) -> None:
    assert build(monkeypatch)["enable_chunked_prefill"] is False
    with pytest.raises(ValueError, match=r"options\.enable_chunked_prefill=True works on GPUs alone"):
        build(monkeypatch, enable_chunked_prefill=True)
