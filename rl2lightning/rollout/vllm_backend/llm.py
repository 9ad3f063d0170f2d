"""An engine of vLLM in this process: how it is built and asked, step by step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.vllm_backend.process import (
    engine_environment,
    larger_blocks,
    own_random_numbers,
    process_kept,
)
from rl2lightning.rollout.vllm_backend.weights import LLM, Adapter, room_for
from rl2lightning.types import SamplingParams


@dataclass(frozen=True)
class Settings:
    """What `VLLMEngine` decided about the LLM to be built."""

    architecture: str
    tensor: int
    max_model_len: int
    max_num_seqs: int | None
    kv_cache_memory_bytes: int
    enforce_eager: bool
    sleeps: bool
    adapter_rank: int | None
    others: dict[str, Any]


_SET_BY = {  # what of vLLM's arguments is an argument of the engine, and which
    "tensor_parallel_size": "tensor",
    "enable_sleep_mode": "sleep",
    "enable_lora": "lora",
    "gpu_memory_utilization": "kv_cache_memory_bytes",  # the one would do nothing, the other overrule it
    "num_gpu_blocks_override": "kv_cache_memory_bytes",
    **{name: name for name in ("kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "enforce_eager")},
}
_DECIDED = {
    # by what is trained
    *("model", "hf_config_path", "hf_overrides", "model_weights", "model_impl", "model_class_overrides", "load_format"),
    *("runner", "convert", "tokenizer", "skip_tokenizer_init", "max_loras", "max_lora_rank", "lora_target_modules"),
    # by how it is sampled
    *("seed", "generation_config", "override_generation_config", "logprobs_mode"),
    # by which processes there are
    *("distributed_executor_backend", "pipeline_parallel_size", "prefill_context_parallel_size"),
    *("nnodes", "node_rank", "master_addr", "master_port", "device_ids"),
    # by the pushes of weights, after which caches elsewhere would go on with the old ones
    *("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"),
}


def check_options(options: dict[str, Any]) -> None:
    """Raises ValueError for an argument of vLLM that is not the user's to give."""
    for name, value in options.items():
        said = f"engine.init_args.options.{name}={value!r}"
        if name in _SET_BY:
            raise ValueError(f"{said}: set engine.init_args.{_SET_BY[name]} instead")
        if name == "seed":
            raise ValueError(f"{said}: set seed of RolloutCallback, or seed_everything, instead")
        if name in _DECIDED or name.startswith("data_parallel"):
            raise ValueError(f"{said} is decided by the run; leave it out")


def build(spec: EngineSpec, settings: Settings) -> LLM:
    """An LLM on dummy weights; all processes of the run build theirs together."""
    device = torch.device(spec.device)
    arguments: dict[str, Any] = {
        "model": spec.model_path,
        "hf_overrides": {"architectures": [settings.architecture]},  # what is trained, whatever the directory says
        "skip_tokenizer_init": not spec.structured,  # tokens in, tokens out; grammars are about texts
        "load_format": "dummy",
        "dtype": str(spec.dtype).removeprefix("torch."),
        "seed": 0,  # of the dummy weights; requests bring their own
        "tensor_parallel_size": settings.tensor,
        "max_model_len": settings.max_model_len,
        "kv_cache_memory_bytes": settings.kv_cache_memory_bytes,
        "gpu_memory_utilization": 0.05,  # only asked for, not used, where the cache's size is given
        "enforce_eager": settings.enforce_eager,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
        "generation_config": "vllm",  # sampling by what the request says alone
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if spec.structured:
        assert spec.tokenizer is not None
        arguments["tokenizer"] = spec.tokenizer.name_or_path
    if settings.max_num_seqs is not None:
        arguments["max_num_seqs"] = settings.max_num_seqs
    if settings.adapter_rank is not None:
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for(settings.adapter_rank)}
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if dist.is_initialized():
        arguments["distributed_executor_backend"] = "external_launcher"
    if device.type == "cpu":
        # its CPU generators cannot go on in the middle of a prompt, so a prompt is one piece
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(2048, settings.max_model_len)
        if settings.others.get("enable_chunked_prefill"):
            raise ValueError("engine.init_args.options.enable_chunked_prefill=True works on GPUs alone; leave it out")
    arguments |= settings.others
    with process_kept(), own_random_numbers(device):
        os.environ.update(engine_environment(device))
        import vllm
        from vllm.model_executor.models import registry

        # vLLM looks at the model's class in a process of its own, to keep CUDA out of this one; here it is in use
        # anyway, and a subprocess would do without what rl2lightning.compat does for this one
        apart, registry._run_in_subprocess = registry._run_in_subprocess, lambda fn: fn()
        try:
            with larger_blocks(device):
                return vllm.LLM(**arguments)  # type: ignore[attr-defined] - ours has its name
        finally:
            registry._run_in_subprocess = apart


def request_params(sampling: SamplingParams, *, max_tokens: int, stop_token_ids: tuple[int, ...], seed: int) -> Any:
    """vLLM's sampling parameters of one request."""
    from vllm.sampling_params import SamplingParams as Params
    from vllm.sampling_params import StructuredOutputsParams

    form, structured = sampling.structured, None
    if form is not None:
        choice = list(form.choice) or None
        structured = StructuredOutputsParams(json=form.json_schema, regex=form.regex, choice=choice)
    greedy = sampling.greedy
    params = Params(
        max_tokens=max_tokens,
        temperature=sampling.temperature,
        # a greedy request takes the likeliest token of the whole distribution, and its log-prob
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        min_p=0.0 if greedy else sampling.min_p,
        min_tokens=min(sampling.min_tokens, max_tokens),
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # the stop tokens say it all
        seed=seed,
        logprobs=0,  # of the token drawn alone
        detokenize=False,
        structured_outputs=structured,
        skip_clone=True,  # nobody else has it
    )
    params.stop_token_ids = _StopTokens(stop_token_ids)  # afterwards: some versions keep a list of their own
    return params


class _StopTokens(list):
    """Token ids that end a request; vLLM looks every token up in this list, which may be long."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        super().__init__(token_ids)
        self._set = frozenset(self)

    def __contains__(self, token_id: object) -> bool:
        return token_id in self._set


# Requests go to the engine's core and its tokens come from there: what `LLMEngine.step` makes of them (texts, objects
# per token) nobody reads here, and it takes a good part of a step.


def add_request(llm: LLM, key: str, prompt_ids: list[int], params: Any, adapter: Adapter | None = None) -> None:
    """Starts a request under a name that no other one has had: batches in flight may still be about that."""
    engine = llm.llm_engine
    (prompt,) = engine.renderer.render_cmpl([{"prompt_token_ids": prompt_ids}])
    lora = None if adapter is None else adapter.request
    request = engine.input_processor.process_inputs(
        key, prompt, params, engine.get_supported_tasks(), lora_request=lora
    )
    engine.engine_core.add_request(request)


def abort_requests(llm: LLM, keys: list[str]) -> None:
    """Ends requests one by one.

    What vLLM is told of together it frees in the order of a set of texts, which is another one in each process: those
    of one engine would give different blocks away, and then schedule different tokens.
    """
    for key in keys:
        llm.llm_engine.engine_core.abort_requests([key])


NewTokens = tuple[str, list[int], list[float], str | None]  # of one request: its key, tokens, log-probs, why it ended


def step(llm: LLM) -> list[NewTokens]:
    """One step of the engine; empty also where it only launched the next batch."""
    outputs = llm.llm_engine.engine_core.get_output().outputs
    return [(o.request_id, o.new_token_ids, _logps(o.new_logprobs), _reason(o.finish_reason)) for o in outputs]


def _logps(logprobs: Any) -> list[float]:
    """Of the tokens drawn, which alone were asked for: vLLM's array has one column."""
    return [] if logprobs is None else logprobs.logprobs.ravel().tolist()


def _reason(reason: Any) -> str | None:
    return None if reason is None else str(reason)


# -- processes of one engine ------------------------------------------------------------------------------------------


def host_group(llm: LLM) -> Any:
    """The gloo group of the processes that share this engine."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def end(llm: LLM) -> None:
    """Frees all that the engine holds."""
    llm.llm_engine.engine_core.shutdown()
