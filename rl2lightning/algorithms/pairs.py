"""Preference pairs in `Sequences`: chosen, rejected, chosen, rejected …; a pair stays together, and counts once."""

from __future__ import annotations

from torch import Tensor

from rl2lightning.types import Sequences


def pair_units(seqs: Sequences) -> list[list[int]]:
    """The two halves of each pair, which share a micro-batch: `units` of a module that learns from pairs."""
    return [[i, i + 1] for i in range(0, len(seqs), 2)]


def check_pairs(seqs: Sequences) -> None:
    """Whether the sequences of a step are pairs, the chosen half first.

    Raises:
        ValueError: they are not; names the first sequence that is out of place.
    """
    if seqs.labels is None:
        raise ValueError(
            "these sequences say nothing of which is better, and pairs of a chosen and a rejected answer are needed: "
            "use PreferenceDataModule"
        )
    if len(seqs) % 2:
        raise ValueError(f"{len(seqs)} sequences do not make pairs: each chosen one needs a rejected one behind it")
    chosen, groups = seqs.labels.bool(), seqs.group_ids
    in_place = (chosen[::2] & ~chosen[1::2]) & (groups[::2] == groups[1::2])
    if not bool(in_place.all()):
        i = 2 * int((~in_place).nonzero()[0])
        halves = " and ".join(
            f"{'chosen' if chosen[j] else 'rejected'} of group {int(groups[j])}" for j in (i, i + 1)
        )  # fmt: skip
        raise ValueError(
            f"sequences {i} and {i + 1} are {halves}: a pair is a chosen and then a rejected answer of one group, "
            "as PreferenceDataModule makes them"
        )


def split_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """One number per sequence [2P] into those of the chosen and those of the rejected halves, [P] each."""
    return x[::2], x[1::2]


def on_both_halves(x: Tensor) -> Tensor:
    """One number per pair [P] as [2P]: each half carries its pair's loss, at half a pair's weight."""
    return x.repeat_interleave(2)
