"""Several processes that run one engine: the first decides, the others repeat after it."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

_DONE = -1


class Lockstep:
    """Carries news before their next steps (any picklable object, None for no news) from the leader to the followers.

    Mostly there are none, which costs one number.

    Args:
        group: gloo process group of the processes of one engine.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.leads = dist.get_rank(group) == 0

    def send(self, news: Any) -> None:
        payload = b"" if news is None else pickle.dumps(news)
        self._broadcast(torch.tensor(len(payload)))
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def release(self) -> None:
        """Ends what the followers receive."""
        self._broadcast(torch.tensor(_DONE))

    def receive(self) -> tuple[bool, Any]:
        """Whether there are further steps, and the news before them."""
        size = torch.tensor(0)
        self._broadcast(size)
        if size < 0:
            return False, None
        if size == 0:
            return True, None
        payload = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(payload)
        return True, pickle.loads(payload.numpy().tobytes())

    def _broadcast(self, x: torch.Tensor) -> None:
        dist.broadcast(x, group=self.group, group_src=0)
