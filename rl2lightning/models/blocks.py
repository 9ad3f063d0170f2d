"""Block attention: packed queries against packed keys with the log-sum-exp, by one of several kernels.

Segment i of the queries sees segment i of the keys, all of it or (causal) aligned to the bottom right corner: the last
query sees the last key. The backward pass takes the output and the log-sum-exp of the *whole* row of scores, of which
the keys at hand may be a part: so the blocks of a ring are summed without another pass.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from rl2lightning.models.attention import AttentionSpec, move

BackendName = Literal["auto", "fa4", "cudnn", "flash_attn", "aten", "math"]

Forward = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class Segments:
    """Boundaries of packed segments, known to host and device, so that no layer makes one wait for the other."""

    edges: tuple[int, ...]  # [n + 1]
    cu: Tensor  # [n + 1] int32, the same
    longest: int

    @staticmethod
    def of(lengths: Sequence[int]) -> Segments:
        edges = [0]
        for length in lengths:
            edges.append(edges[-1] + length)
        return Segments(tuple(edges), torch.tensor(edges, dtype=torch.int32), max(lengths, default=0))

    def to(self, device: torch.device) -> Segments:
        return replace(self, cu=move(self.cu, device))

    def __len__(self) -> int:
        return len(self.edges) - 1

    @property
    def total(self) -> int:
        return self.edges[-1]

    @property
    def spans(self) -> Iterator[tuple[int, int]]:
        return zip(self.edges[:-1], self.edges[1:], strict=True)


@dataclass(frozen=True)
class Demand:
    """What a backend is asked to serve."""

    device: torch.device
    dtype: torch.dtype
    head_size: int
    window: int | None
    softcap: float | None
    mean_length: float  # of the segments
    square: bool  # whether causal blocks have as many queries as keys

    @staticmethod
    def of(q: Tensor, spec: AttentionSpec, segments: Segments, *, square: bool = True) -> Demand:
        mean = segments.total / max(len(segments), 1)
        return Demand(q.device, q.dtype, q.shape[-1], spec.window, spec.softcap, mean, square)

    @property
    def capability(self) -> tuple[int, int]:
        return _capability(self.device) if self.device.type == "cuda" else (0, 0)


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


@functools.cache
def installed(distribution: str) -> bool:
    """Whether a package is there, by its metadata: nothing is imported."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


@functools.cache
def import_error(module: str) -> str | None:
    """Why a module that is installed cannot be imported, such as kernels built for another torch; None where it can."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package's own code raises
        return f"importing {module} raises {type(error).__name__}: {error}"
    return None


class BlockBackend(ABC):
    """One family of kernels."""

    name: ClassVar[str]

    @abstractmethod
    def refusal(self, demand: Demand) -> str | None:
        """Why these kernels cannot serve, or None where they can."""

    def prefers(self, demand: Demand) -> bool:
        """Whether they are a good choice where they can serve."""
        return True

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec
    ) -> Forward:
        """q [m, H, D], k and v [n, H_kv, D] to the output [m, H, D], in q's type or wider, and log-sum-exp [H, m]."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec,
    ) -> Gradients:  # fmt: skip
        """What these keys contribute to the gradients of q, k and v, given the output and log-sum-exp over all keys."""
