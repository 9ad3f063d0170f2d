"""Pairs: which sequences belong together, and what is refused."""

import pytest
import torch

from rl2lightning.algorithms.pairs import PairMetrics, check_pairs, on_both_halves, pair_units, split_pairs
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
        (None, [0, 0], "PreferenceDataModule"),
        ([True, False, True], [0, 0, 1], "3 sequences do not make pairs"),
        ([True, False, False, True], [0, 0, 1, 1], "sequences 2 and 3 are rejected of group 1 and chosen of group 1"),
        ([True, True], [0, 0], "sequences 0 and 1 are chosen of group 0 and chosen of group 0"),
        ([True, False, True, False], [0, 0, 1, 2], "sequences 2 and 3 are chosen of group 1 and rejected of group 2"),
    ],
)
def test_what_is_no_pair_is_refused(labels, group_ids, message):
    with pytest.raises(ValueError, match=message):
        check_pairs(pairs(labels, group_ids))


def test_a_number_per_pair_stands_on_both_halves():
    chosen, rejected = split_pairs(torch.tensor([1.0, 2.0, 3.0, 5.0]))
    assert chosen.tolist() == [1.0, 3.0]
    assert rejected.tolist() == [2.0, 5.0]
    assert on_both_halves(rejected - chosen).tolist() == [1.0, 1.0, 2.0, 2.0]


def test_held_out_metrics_by_hand_over_batches_of_different_sizes():
    metrics = PairMetrics()
    metrics.update(torch.tensor([3.0, 1.0, 0.0, 4.0]), torch.tensor([0.5, 1.5]))  # pairs (3, 1) and (0, 4)
    metrics.update(torch.tensor([9.0, 1.0]), torch.tensor([1.0]))
    found = {name: float(x) for name, x in metrics.compute().items()}
    assert found == pytest.approx(
        {
            "loss": 1.0,
            "accuracy": 2 / 3,
            "margin": 2.0,  # (2 - 4 + 8) / 3
            "chosen_reward": 4.0,
            "rejected_reward": 2.0,
            "reward_mean": 3.0,
            "reward_std": 3.0,  # deviations 0, -2, -3, 1, 6, -2: 54 / 6 squared
        }
    )
    metrics.reset()
    metrics.update(torch.tensor([1000.001, 1000.0]), torch.tensor([0.0]))  # far from 0, and hardly apart
    assert float(metrics.compute()["reward_std"]) == pytest.approx(0.0005, rel=0.05)
