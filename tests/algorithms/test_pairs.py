"""Pairs: which sequences belong together, and what is refused."""

import pytest
import torch

from rl2lightning.algorithms.pairs import check_pairs, on_both_halves, pair_units, split_pairs
from rl2lightning.types import Sequences


def pairs(labels: list[bool] | None, group_ids: list[int]) -> Sequences:
    n = len(group_ids)
    return Sequences.from_lists(
        [[5, 6 + i] for i in range(n)],
        [[False, True]] * n,
        group_ids,
        labels=None if labels is None else torch.tensor(labels),
    )


def test_the_halves_of_a_pair_are_a_unit():
    seqs = pairs([True, False] * 3, [7, 7, 4, 4, 9, 9])
    check_pairs(seqs)
    assert pair_units(seqs) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("labels", "group_ids", "message"),
    [
        (None, [0, 0], "say nothing of which answer is better"),
        ([True, False, True], [0, 0, 1], "3 answers do not make pairs"),
        ([True, False, False, True], [0, 0, 1, 1], "answers 2 and 3 of the batch are none"),
        ([True, True], [0, 0], "answers 0 and 1 of the batch are none"),
        ([True, False, True, False], [0, 0, 1, 2], "answers 2 and 3 of the batch are none"),
    ],
)
def test_what_is_no_pair_is_refused(labels, group_ids, message):
    with pytest.raises(ValueError, match=f"{message}.*: set data to rl2lightning.PreferenceDataModule$"):
        check_pairs(pairs(labels, group_ids))


def test_a_number_per_pair_stands_on_both_halves():
    chosen, rejected = split_pairs(torch.tensor([1.0, 2.0, 3.0, 5.0]))
    assert chosen.tolist() == [1.0, 3.0]
    assert rejected.tolist() == [2.0, 5.0]
    assert on_both_halves(rejected - chosen).tolist() == [1.0, 1.0, 2.0, 2.0]
