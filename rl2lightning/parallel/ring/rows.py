"""One rank's rows of the sequences that are cut: where the two chunks of each lie, and which keys they see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from rl2lightning.models.attention import move
from rl2lightning.models.blocks import Segments
from rl2lightning.parallel.ring.layout import Zigzag


@dataclass(frozen=True, eq=False)
class Half:
    """The front or the back halves of the rows of all cut sequences: of a single one a slice, which copies nothing."""

    rows: slice | Tensor

    @staticmethod
    def of(chunks: Sequence[int], *, back: bool) -> Half:
        if len(chunks) == 1:
            return Half(slice(chunks[0], None) if back else slice(0, chunks[0]))
        start, parts = 0, [torch.zeros(0, dtype=torch.long)]
        for chunk in chunks:
            parts.append(torch.arange(chunk) + start + back * chunk)
            start += 2 * chunk
        return Half(torch.cat(parts))

    def to(self, device: torch.device) -> Half:
        return self if isinstance(self.rows, slice) else Half(move(self.rows, device))

    def take(self, x: Tensor) -> Tensor:
        return x[self.rows] if isinstance(self.rows, slice) else x.index_select(0, self.rows)

    def add_(self, x: Tensor, y: Tensor) -> None:
        """Adds y to these rows of x."""
        if isinstance(self.rows, slice):
            x[self.rows].add_(y)
        else:
            x.index_add_(0, self.rows, y.to(x.dtype))

    def put_(self, x: Tensor, y: Tensor) -> None:
        """Replaces these rows of x by what was taken of them, unless that was no copy."""
        if not isinstance(self.rows, slice):
            x.index_copy_(0, self.rows, y)


@dataclass(frozen=True, eq=False)
class CutRows:
    """This rank's rows of the sequences that are cut, two chunks of each."""

    chunks: tuple[int, ...]
    rank: int
    size: int
    full: Segments  # both chunks of each sequence
    half: Segments  # one chunk of each
    front: Half
    back: Half

    @staticmethod
    def of(layout: Zigzag, rank: int) -> CutRows:
        chunks = layout.chunks
        full, half = Segments.of([2 * n for n in chunks]), Segments.of(chunks)
        return CutRows(chunks, rank, layout.size, full, half, Half.of(chunks, back=False), Half.of(chunks, back=True))

    def to(self, device: torch.device) -> CutRows:
        return replace(
            self,
            full=self.full.to(device),
            half=self.half.to(device),
            front=self.front.to(device),
            back=self.back.to(device),
        )

    @property
    def total(self) -> int:
        return self.full.total

    # ---- what `Gather` needs, made when it is first asked for

    @cached_property
    def prefix(self) -> Tensor:
        """Rows of the gathered keys (rank by rank) that each of this rank's chunks sees, its own last."""
        p, start, parts = self.size, 0, []
        for chunk in self.chunks:
            where = [  # of each chunk in the order of the sequence
                (c if c < p else 2 * p - 1 - c) * self.total + start + (0 if c < p else chunk) for c in range(2 * p)
            ]
            for last in (self.rank, 2 * p - 1 - self.rank):
                parts += [torch.arange(chunk) + at for at in where[: last + 1]]
            start += 2 * chunk
        return move(torch.cat(parts), self.full.cu.device)

    @cached_property
    def each_chunk(self) -> Segments:
        return Segments.of([n for n in self.chunks for _ in range(2)]).to(self.full.cu.device)

    @cached_property
    def each_prefix(self) -> Segments:
        seen = (self.rank + 1, 2 * self.size - self.rank)  # chunks, of the front one and of the back one
        return Segments.of([n * num for n in self.chunks for num in seen]).to(self.full.cu.device)
