"""Which sequences share a micro-batch: integers in, integers out, the same on every rank."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

_Bin = tuple[int, list[int]]  # sum of lengths, indices


def karmarkar_karp(lengths: Sequence[int], num_bins: int) -> list[list[int]]:
    """Partition into num_bins parts of nearly equal sums: the largest differencing method (Karmarkar and Karp, 1982).

    Every item starts as a partition of its own. The two partitions that are least level are merged, the largest part
    of one with the smallest of the other, until one is left.

    Args:
        lengths: of each item, not negative.
        num_bins: parts; some stay empty when there are fewer items.

    Returns:
        num_bins lists of indices into `lengths`, from the largest sum to the smallest, each ascending.
    """
    if num_bins < 1:
        raise ValueError(f"num_bins={num_bins} must be at least 1")
    ticket = count()  # breaks ties by age, so the result depends on nothing else
    heap = [(-length, next(ticket), [(length, [index])]) for index, length in enumerate(lengths)]
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = _merge(heapq.heappop(heap)[2], heapq.heappop(heap)[2], num_bins)
        smallest = merged[-1][0] if len(merged) == num_bins else 0
        heapq.heappush(heap, (smallest - merged[0][0], next(ticket), merged))
    bins = [sorted(indices) for _, indices in heap[0][2]] if heap else []
    return bins + [[] for _ in range(num_bins - len(bins))]


def _merge(a: list[_Bin], b: list[_Bin], num_bins: int) -> list[_Bin]:
    """Two partitions into one, all from the largest bin to the smallest; empty bins are left out of the lists."""
    alone = num_bins - len(b)  # bins of a that meet an empty bin of b
    paired = [
        (sum_a + sum_b, items_a + items_b)
        for (sum_a, items_a), (sum_b, items_b) in zip(a[alone:], reversed(b), strict=False)
    ]
    return sorted(a[:alone] + paired + b[: len(b) - len(paired)], key=lambda x: x[0], reverse=True)


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    multiple_of: int = 1,
    units: Sequence[Sequence[int]] | None = None,
    setting: str = "max_tokens_per_device",
) -> list[list[int]]:
    """Cut one optimizer step into micro-batches of at most max_tokens tokens, as few and as level as they come.

    Args:
        lengths: tokens of every sequence of the step, over all ranks.
        max_tokens: budget of a micro-batch.
        multiple_of: the data-parallel size R; rank r takes the r-th contiguous chunk of the result, and the j-th
            micro-batches of all ranks are of similar size.
        units: index lists that must stay together (pairs), covering every sequence once; None: each by itself.
        setting: what the error for a unit over budget tells the user to raise.

    Returns:
        At least R lists of indices, a multiple of R; some are empty if there are fewer units than lists.

    Raises:
        ValueError: a unit is longer than the budget.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} must be at least 1")
    if max_tokens < 1:
        raise ValueError(f"{max_tokens} tokens do not make a micro-batch; raise {setting}")
    if units is None:
        units = [[index] for index in range(len(lengths))]
    elif sorted(index for unit in units for index in unit) != list(range(len(lengths))):
        raise ValueError(f"units must hold each of the {len(lengths)} sequences exactly once")
    sizes = [sum(lengths[index] for index in unit) for unit in units]
    for unit, size in zip(units, sizes, strict=True):
        if size > max_tokens:
            name = f"sequence {unit[0]} has" if len(unit) == 1 else f"sequences {list(unit)} belong together and have"
            raise ValueError(f"{name} {size} tokens, more than the {max_tokens} of a micro-batch; raise {setting}")
    num_bins = _round_up(_least_bins(sizes, max_tokens), multiple_of)
    while True:
        bins = karmarkar_karp(sizes, num_bins)
        if all(sum(sizes[i] for i in members) <= max_tokens for members in bins):
            break
        num_bins += multiple_of
    # bins come largest first: dealing them out gives every rank its share of the large and of the empty ones
    dealt = [bins[i] for rank in range(multiple_of) for i in range(rank, num_bins, multiple_of)]
    return [sorted(index for i in members for index in units[i]) for members in dealt]


def _least_bins(sizes: Sequence[int], max_tokens: int) -> int:
    """A lower bound on the bins needed: total / budget, and no bin holds more than k - 1 items above budget / k."""
    bound = max(1, -(-sum(sizes) // max_tokens))
    for k in range(2, 9):
        large = sum(size * k > max_tokens for size in sizes)
        bound = max(bound, -(-large // (k - 1)))
    return bound


def _round_up(n: int, multiple_of: int) -> int:
    return -(-n // multiple_of) * multiple_of
