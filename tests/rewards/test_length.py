import pytest

from rl2lightning.rewards.length import LengthPenalty, SoftOverlong
from rl2lightning.types import Trajectory


def of_length(n: int) -> Trajectory:
    return Trajectory(row={}, group_id=0, action_mask=[False] * 50 + [True] * n)


@pytest.mark.parametrize(
    ("length", "reward"), [(0, 0), (16, 0), (17, -0.25), (19, -0.75), (20, -1), (21, -1), (99, -1)]
)
def test_soft_overlong_by_hand(length, reward):
    assert SoftOverlong(max_length=20, cache_length=4)(of_length(length)) == reward


def test_length_penalty_counts_what_the_policy_wrote():
    assert LengthPenalty(scale=8)(of_length(12)) == -1.5


@pytest.mark.parametrize("cache_length", [0, 21])
def test_a_ramp_that_does_not_fit_is_refused(cache_length):
    with pytest.raises(ValueError, match=f"cache_length={cache_length}"):
        SoftOverlong(max_length=20, cache_length=cache_length)
    with pytest.raises(ValueError, match="scale=0"):
        LengthPenalty(scale=0)
