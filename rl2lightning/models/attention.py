"""What a layer asks of attention over packed rows, and the interface behind which the kernels stand."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of causal attention besides its tensors."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all of them
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    dropout: float = 0.0  # share of attention weights dropped in training


class PackedAttention(ABC):
    """How the rows of one packed micro-batch attend: each causally to the rows of its own sequence."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [m, H, D], k and v [m, H_kv, D] to [m, H, D]; m rows of this process."""

    @abstractmethod
    def to(self, device: torch.device) -> PackedAttention:
        """The same with its index tensors on `device`."""


def move(x: Tensor, device: torch.device) -> Tensor:
    """To a device without making the host wait: a GPU copies from page-locked memory."""
    return (x.pin_memory() if device.type == "cuda" and not x.is_cuda else x).to(device, non_blocking=True)
