"""When several updates on one rollout have led the policy too far from where it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class KLLimit:
    """Whether the KL has exceeded a limit, one look late, so that the host does not wait for the device.

    Args:
        target: the limit; None: there is none.
    """

    def __init__(self, target: float | None) -> None:
        if target is not None and not target > 0:
            raise ValueError(f"target_kl={target} must be positive, or null for no limit")
        self.target = target
        self.reset()

    def reset(self) -> None:
        """A new rollout: its policy is the one to keep near."""
        self._exceeded = False
        self._seen: Tensor | None = None  # what was noted last, in host memory once the event has passed
        self._event: torch.cuda.Event | None = None

    def note(self, kl: Tensor) -> None:
        """What a step found, a scalar on the device; it is looked at before the next step."""
        if kl.is_cuda:
            self._seen = torch.empty((), pin_memory=True).copy_(kl, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._seen = kl

    def exceeded(self) -> bool:
        """Whether the last step noted, or one before it in this rollout, found the KL above the limit."""
        if self.target is not None and self._seen is not None:
            self._exceeded |= self._value() > self.target
        return self._exceeded

    def _value(self) -> float:
        if self._event is not None:
            self._event.synchronize()
        assert self._seen is not None
        return float(self._seen)

    def state_dict(self) -> dict[str, Any]:
        return {"exceeded": self._exceeded, "seen": None if self._seen is None else self._value()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.reset()
        self._exceeded = state_dict["exceeded"]
        self._seen = None if state_dict["seen"] is None else torch.tensor(state_dict["seen"])
