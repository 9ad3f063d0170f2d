"""The weights of an engine of vLLM: all of them anew, or an adapter's; and the KV cache, which knows the old ones."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl2lightning.rollout.vllm_backend.process import own_random_numbers

LLM = Any  # vllm.LLM, which nothing imports before it is needed


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


def room_for(rank: int) -> int:
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
