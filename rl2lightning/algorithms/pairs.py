"""Preference pairs in `Sequences`: chosen, rejected, chosen, rejected …; a pair stays together, and counts once."""

from __future__ import annotations

from torch import Tensor

from rl2lightning.types import Sequences

_INSTEAD = "set data to rl2lightning.PreferenceDataModule"


def pair_units(seqs: Sequences) -> list[list[int]]:
    """The two halves of each pair, which share a micro-batch: `units` of a module that learns from pairs."""
    return [[i, i + 1] for i in range(0, len(seqs), 2)]


def check_pairs(seqs: Sequences) -> None:
    """Whether the sequences of a step are pairs, the chosen half first.

    Raises:
        ValueError: they are not; names the first answers that are no pair and the data module that makes pairs.
    """
    if seqs.labels is None:
        raise ValueError(
            "these samples say nothing of which answer is better, and pairs of a chosen and a rejected answer are "
            f"needed: {_INSTEAD}"
        )
    if len(seqs) % 2:
        raise ValueError(
            f"{len(seqs)} answers do not make pairs, and a rejected one is needed behind each chosen one: {_INSTEAD}"
        )
    chosen, groups = seqs.labels.bool(), seqs.group_ids
    in_place = (chosen[::2] & ~chosen[1::2]) & (groups[::2] == groups[1::2])
    if not bool(in_place.all()):
        i = 2 * int((~in_place).nonzero()[0])
        raise ValueError(
            "pairs of a chosen and a rejected answer to one prompt are needed, and the answers "
            f"{i} and {i + 1} of the batch are none: {_INSTEAD}"
        )


def split_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    """One number per sequence [2P] into those of the chosen and those of the rejected halves, [P] each."""
    return x[::2], x[1::2]


def on_both_halves(x: Tensor) -> Tensor:
    """One number per pair [P] as [2P]: each half carries its pair's loss, at half a pair's weight."""
    return x.repeat_interleave(2)
