"""What vLLM may not do to the process it runs in, where the trainer is, and what it finds there while it is built."""

from __future__ import annotations

import contextlib
import os
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

_BLOCK_SIZE = 64  # tokens of KV cache handed out at a time: by vLLM's 16, the host does that four times as often


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


def engine_environment(device: torch.device) -> dict[str, str]:
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
