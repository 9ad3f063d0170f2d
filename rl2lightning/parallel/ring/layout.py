"""The zigzag layout: which process of a ring holds which tokens of a packed micro-batch. Pure arithmetic.

A sequence that is cut has 2P chunks of equal length, and rank r holds chunks r and 2P-1-r: an early one, whose tokens
see little, and a late one, whose tokens see much, so that causal attention is the same work everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_TOLERANCE = 1.1  # the busiest rank may have so much more than the mean before another sequence is cut
_MIN_CHUNK = 128  # rows; a shorter chunk fills no tile of a kernel
_QUADRATIC = 65536  # tokens at which attention costs about as much as the rest of a transformer


@dataclass(frozen=True)
class Zigzag:
    """Where the tokens of a packed micro-batch are.

    Rows of rank r: of each cut sequence its front chunk r and its back chunk 2P-1-r, then whole sequences, then
    padding. Sequences without tokens are nowhere.
    """

    lengths: tuple[int, ...]  # [B] tokens of each sequence
    cut: tuple[int, ...]  # sequences that are cut, ascending
    whole: tuple[tuple[int, ...], ...]  # [P] sequences that each rank holds alone, ascending
    row_multiple: int

    @property
    def size(self) -> int:
        return len(self.whole)

    @property
    def chunks(self) -> tuple[int, ...]:
        """Length of the chunks of each cut sequence, the last of which may end in padding."""
        return tuple(-(-self.lengths[i] // (2 * self.size)) for i in self.cut)

    def padding(self, rank: int) -> int:
        """Rows at the end that hold nothing: at least one row in all, and a multiple of `row_multiple`."""
        rows = 2 * sum(self.chunks) + sum(self.lengths[i] for i in self.whole[rank])
        return -rows % self.row_multiple if rows else self.row_multiple

    def rows(self, rank: int) -> tuple[Tensor, Tensor]:
        """[m] the packed token behind each row of a rank, -1 for none; and [m] its position in its sequence."""
        starts = [0]
        for length in self.lengths:
            starts.append(starts[-1] + length)
        tokens, positions = [], []
        for i, chunk in zip(self.cut, self.chunks, strict=True):
            for part in (rank, 2 * self.size - 1 - rank):
                at = torch.arange(part * chunk, (part + 1) * chunk)
                tokens.append(torch.where(at < self.lengths[i], at + starts[i], -1))
                positions.append(at)
        for i in self.whole[rank]:
            at = torch.arange(self.lengths[i])
            tokens.append(at + starts[i])
            positions.append(at)
        padding = self.padding(rank)
        tokens.append(torch.full((padding,), -1))
        positions.append(torch.arange(padding))
        return torch.cat(tokens), torch.cat(positions)


def zigzag(lengths: Sequence[int], size: int, *, split_from: int | None = None, row_multiple: int = 1) -> Zigzag:
    """The layout of sequences of these lengths over `size` processes.

    Args:
        lengths: [B] tokens of each sequence.
        size: P, processes of the ring.
        split_from: sequences of at least so many tokens are cut, shorter ones stay whole on the least loaded rank.
            None: the longest are cut until the load is even. A sequence that stays whole needs no communication and
            keeps its kernels large.
        row_multiple: the rows of every rank are padded to a multiple of this.
    """
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: (-lengths[i], i))
    if split_from is None:
        num_cut = _fewest_cuts([lengths[i] for i in order], size)
    else:
        num_cut = sum(lengths[i] >= split_from for i in order)
    whole = _assign([_cost(lengths[i]) for i in order[num_cut:]], size)
    return Zigzag(
        lengths=tuple(lengths),
        cut=tuple(sorted(order[:num_cut])),
        whole=tuple(tuple(sorted(order[num_cut + i] for i in mine)) for mine in whole),
        row_multiple=row_multiple,
    )


def _cost(length: int) -> float:
    return length + length * length / _QUADRATIC


def _fewest_cuts(lengths: list[int], size: int) -> int:
    """How many of the longest (they come first) must be cut for even work and memory; short ones are not worth it."""
    num_cut = 0
    while num_cut < len(lengths) and lengths[num_cut] >= 2 * size * _MIN_CHUNK and not _even(lengths, num_cut, size):
        num_cut += 1
    return num_cut


def _even(lengths: list[int], num_cut: int, size: int) -> bool:
    """Whether no rank has much more to do, or to hold, than the mean when the first `num_cut` sequences are cut."""
    costs = [_cost(n) for n in lengths]
    whole = _assign(costs[num_cut:], size)
    for amounts in (costs, lengths):  # a long sequence is as much work as many more tokens in short ones
        shared, rest = sum(amounts[:num_cut]) / size, amounts[num_cut:]
        if shared + max(sum(rest[i] for i in mine) for mine in whole) > _TOLERANCE * sum(amounts) / size:
            return False
    return True


def _assign(costs: list[float], size: int) -> list[list[int]]:
    """Indices for each rank, every one to the least loaded so far; the costs descend."""
    load, mine = [0.0] * size, [[] for _ in range(size)]
    for i, cost in enumerate(costs):
        rank = min(range(size), key=load.__getitem__)
        mine[rank].append(i)
        load[rank] += cost
    return mine
