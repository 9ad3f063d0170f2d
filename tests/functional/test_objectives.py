import pytest
import torch

from rl2lightning.functional.advantages import group_relative
from rl2lightning.functional.objectives import (
    chebyshev,
    dominates,
    group_normalised_sum,
    hypervolume,
    pareto_front,
    weighted_sum,
)

t = torch.tensor


def test_the_weighted_sum_by_hand():
    assert weighted_sum(t([[1.0, 2.0], [3.0, 0.0]]), t([1.0, 0.5])).tolist() == [2.0, 3.0]


def test_chebyshev_is_the_worst_weighted_gap():
    # gaps to (1, 1): (0, 1) and (0.5, 0.5), weights 1 and 2
    assert chebyshev(t([[1.0, 0.0], [0.5, 0.5]]), t([1.0, 2.0]), t([1.0, 1.0])).tolist() == [-2.0, -1.0]


def test_chebyshev_can_prefer_a_compromise_that_no_weighted_sum_would():
    points = t([[1.0, 0.0], [0.0, 1.0], [0.4, 0.4]])  # the third lies inside the line between the others
    assert chebyshev(points, t([1.0, 1.0]), t([1.0, 1.0])).argmax() == 2
    for weight in torch.linspace(0, 1, 11):
        assert weighted_sum(points, torch.stack([weight, 1 - weight])).argmax() != 2


def test_group_normalised_sum_makes_a_small_reward_count_like_a_large_one():
    rewards, groups = t([[0.0, 0.01], [100.0, 0.0]]), t([0, 0])
    summed = group_normalised_sum(rewards, t([1.0, 1.0]), groups)
    assert summed.abs().max() < 1e-3  # they pull in opposite ways with the same force
    assert group_relative(rewards.sum(1), groups, divide_by_std=True, unbiased=True)[1] > 0.7


def test_group_normalised_sum_of_one_reward_is_group_relative():
    rewards, groups = torch.rand(6, 1), t([0, 0, 0, 1, 1, 1])
    expected = 2 * group_relative(rewards[:, 0], groups, divide_by_std=True, unbiased=True)
    torch.testing.assert_close(group_normalised_sum(rewards, t([2.0]), groups), expected)


def test_dominance_needs_one_strict_gain_and_no_loss():
    a = t([1.0, 1.0])
    others = t([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    assert dominates(a, others).tolist() == [True, False, False]
    assert dominates(others, a).tolist() == [False, False, False]


def test_the_front_by_hand():
    points = t([[2.0, 0.0], [1.0, 1.0], [0.0, 2.0], [0.5, 0.5], [1.0, 0.0], [1.0, 1.0]])
    assert pareto_front(points).tolist() == [True, True, True, False, False, True]


def test_hypervolume_by_hand():
    zero = t([0.0, 0.0])
    assert hypervolume(t([[2.0, 1.0]]), zero).item() == 2
    # two 2 x 1 rectangles overlap in the unit square
    assert hypervolume(t([[2.0, 1.0], [1.0, 2.0]]), zero).item() == 3
    assert hypervolume(t([[2.0, 1.0], [1.0, 2.0], [0.5, 0.5]]), zero).item() == 3
    assert hypervolume(t([[2.0, 1.0], [1.0, 2.0]]), t([1.0, 0.0])).item() == 1
    assert hypervolume(t([[5.0, -1.0]]), zero).item() == 0
    assert hypervolume(torch.zeros(0, 2), zero).item() == 0
    assert hypervolume(t([[3.0], [2.0]]), t([1.0])).item() == 2
    # two boxes 2 x 1 x 1 and 1 x 1 x 2 share the unit cube
    assert hypervolume(t([[2.0, 1.0, 1.0], [1.0, 1.0, 2.0]]), t([0.0, 0.0, 0.0])).item() == 3


@pytest.mark.parametrize("num_objectives", [2, 3, 4])
def test_hypervolume_counts_the_cells_of_a_grid(num_objectives):
    generator = torch.Generator().manual_seed(num_objectives)
    points = torch.randint(0, 5, (8, num_objectives), generator=generator)
    cells = torch.cartesian_prod(*[torch.arange(5)] * num_objectives)  # cell c fills [c, c + 1] in every direction
    covered = (points.unsqueeze(0) > cells.unsqueeze(1)).all(-1).any(-1).sum()
    assert hypervolume(points.double(), torch.zeros(num_objectives, dtype=torch.float64)).item() == covered
