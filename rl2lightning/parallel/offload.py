"""Moving what training holds on the GPU to the host while something else needs the room."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_CHUNK = 2**30  # torch's cache rounds page-locked memory up to a power of two: a weight of 2.1 GB would take 4


@contextmanager
def in_host_memory(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the tensors have no storage on their device; afterwards they hold what they held.

    The tensors stay the objects they are, and so do views of them: only their storages are emptied and filled again.
    The copies are kept in page-locked memory, where there is a GPU, and are given up at the end.
    """
    storages = _storages(tensors)
    pin = any(s.device.type == "cuda" for s in storages)
    sizes = [s.nbytes() for s in storages]
    chunks = _host_chunks(sum(sizes), pin=pin)
    for there, here in _beside(storages, chunks):
        here.copy_(there, non_blocking=True)
    _wait(pin)
    for storage in storages:
        storage.resize_(0)
    if pin:
        torch.cuda.empty_cache()  # an engine beside us allocates outside this cache
    try:
        yield
    finally:
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
        for there, here in _beside(storages, chunks):
            there.copy_(here, non_blocking=True)
        _wait(pin)


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[Tensor]:
    """The state that grows with the model: moments, not step counters."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (x for x in state.values() if isinstance(x, Tensor) and x.ndim)


def _storages(tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
    """Each storage once, whichever of its views are given."""
    found: dict[int, torch.UntypedStorage] = {}
    for x in tensors:
        local = x._local_tensor if isinstance(x, DTensor) else x
        storage = local.untyped_storage()
        if storage.nbytes():
            found.setdefault(storage.data_ptr(), storage)
    return list(found.values())


def _host_chunks(num_bytes: int, *, pin: bool) -> list[Tensor]:
    """So many bytes of the host, in pieces of a size that torch's cache of page-locked memory does not round up."""
    sizes = [min(_CHUNK, num_bytes - begin) for begin in range(0, num_bytes, _CHUNK)]
    return [torch.empty(size, dtype=torch.uint8, pin_memory=pin) for size in sizes]


def _beside(storages: list[torch.UntypedStorage], chunks: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """All bytes of the storages, each run of them with its place in the chunks."""
    at = 0
    for storage in storages:
        rest = _bytes(storage)
        while len(rest):
            room = chunks[at // _CHUNK][at % _CHUNK :][: len(rest)]
            yield rest[: len(room)], room
            rest, at = rest[len(room) :], at + len(room)


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _wait(pin: bool) -> None:
    if pin:
        torch.cuda.synchronize()
