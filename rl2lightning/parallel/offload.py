"""Keeping in host memory what training does not need on the GPU at the moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_CHUNK = 2**30  # torch's cache rounds page-locked memory up to a power of two: a weight of 2.1 GB would take 4


class Parked:
    """Tensors whose storages are empty on their device until `give_back`; what they held is in host memory.

    The tensors stay the objects they are, and so do views of them. The copies are in page-locked memory, where there is
    a GPU. Everything is queued on the device's current stream and the host waits for none of it.

    Args:
        room: the `room` of an earlier one on the same stream, used again if it is of the size that is needed.
    """

    def __init__(self, tensors: Iterable[Tensor], room: list[Tensor] | None = None) -> None:
        self._storages = _storages(tensors)
        self.on_gpu = any(s.device.type == "cuda" for s in self._storages)
        self._sizes = [s.nbytes() for s in self._storages]
        if room is None or sum(map(len, room)) != sum(self._sizes):
            room = _host_chunks(sum(self._sizes), pin=self.on_gpu)
        self.room = room
        for there, here in _beside(self._storages, self.room):
            here.copy_(there, non_blocking=True)
        for storage in self._storages:
            storage.resize_(0)

    def give_back(self) -> None:
        for storage, size in zip(self._storages, self._sizes, strict=True):
            storage.resize_(size)
        for there, here in _beside(self._storages, self.room):
            there.copy_(here, non_blocking=True)


@contextmanager
def in_host_memory(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Inside, the tensors have no storage on their device; afterwards they hold what they held."""
    parked = Parked(tensors)
    try:
        if parked.on_gpu:
            torch.cuda.empty_cache()  # an engine beside us allocates outside this cache
        yield
    finally:
        parked.give_back()


class ParkedMoments:
    """Keeps an optimizer's moments in host memory at all times but its own steps.

    Whoever asks for its `state_dict`, or loads one, finds them on the device; `park` ends that. In `state` itself there
    are tensors without storage, which nobody may read.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._parked: Parked | None = None
        self._room: list[Tensor] | None = None  # kept: freed, it would be in use until copies that are queued are made
        optimizer.register_step_pre_hook(lambda *_: self.fetch())
        optimizer.register_step_post_hook(lambda *_: self.park())
        optimizer.register_state_dict_pre_hook(lambda _: self.fetch())
        optimizer.register_load_state_dict_pre_hook(lambda *_: self.fetch())

    def fetch(self) -> None:
        if self._parked is not None:
            self._parked.give_back()  # may fail, and then there is another try
            self._parked = None

    def park(self) -> None:
        if self._parked is None:
            self._parked = Parked(moments(self.optimizer), self._room)
            self._room = self._parked.room


def moments(optimizer: Optimizer) -> Iterator[Tensor]:
    """The state that grows with the model, not step counters."""
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
