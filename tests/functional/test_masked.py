import math

import pytest
import torch

from rl2lightning.functional.masked import (
    loss_divisor,
    loss_weights,
    masked_mean,
    masked_moments,
    masked_sum,
    sequence_mean,
    whiten,
)


def test_sums_and_means_ignore_what_lies_off_the_mask_even_nan():
    x = torch.tensor([[1.0, float("nan")], [3.0, 5.0]])
    mask = torch.tensor([[True, False], [True, True]])
    assert masked_sum(x, mask) == 9
    assert masked_mean(x, mask) == 3
    torch.testing.assert_close(masked_mean(x, mask, dim=1), torch.tensor([1.0, 4.0]))


def test_the_mean_of_nothing_is_zero():
    assert masked_mean(torch.ones(3), torch.zeros(3, dtype=torch.bool)) == 0


def test_moments_by_hand_biased_and_unbiased():
    x, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([True, True, False])
    mean, std = masked_moments(x, mask)
    assert (mean, std) == (2, pytest.approx(math.sqrt(2)))
    assert masked_moments(x, mask, unbiased=False)[1] == 1


def test_a_single_value_has_standard_deviation_zero_and_whitens_to_zero():
    x, mask = torch.tensor([4.0, 1.0]), torch.tensor([True, False])
    mean, std = masked_moments(x, mask)
    assert std == 0
    assert whiten(x, mask, mean=mean, std=std).tolist() == [0, 0]


def test_whitening_gives_mean_0_and_std_1_on_the_mask_only():
    torch.manual_seed(0)
    x, mask = 5 + 3 * torch.randn(4, 50), torch.rand(4, 50) > 0.5
    mean, std = masked_moments(x, mask)
    white = whiten(x, mask, mean=mean, std=std)
    assert white[mask].mean().abs() < 1e-6
    assert (white[mask].std() - 1).abs() < 1e-6
    assert not white[~mask].any()


# sequences of 3, 2 and 2 tokens with 2, 1 and 0 actions
MASK = torch.tensor([False, True, True, False, True, False, False])
IDS = torch.tensor([0, 0, 0, 1, 1, 2, 2])


def test_sequence_means_by_hand():
    x = torch.tensor([9.0, 1.0, 3.0, 9.0, 5.0, 9.0, 9.0])
    torch.testing.assert_close(sequence_mean(x, MASK, IDS, 3), torch.tensor([2.0, 5.0, 0.0]))


@pytest.mark.parametrize(
    ("level", "length", "expected"),
    [
        ("token", None, [0, 1 / 3, 1 / 3, 0, 1 / 3, 0, 0]),
        ("sequence", None, [0, 1 / 4, 1 / 4, 0, 1 / 2, 0, 0]),  # the sequence without actions is not counted
        ("constant", 10, [0, 1 / 20, 1 / 20, 0, 1 / 20, 0, 0]),
    ],
)
def test_loss_weights_by_hand(level, length, expected):
    weights = loss_weights(MASK, IDS, 3, level=level, constant_length=length)
    torch.testing.assert_close(weights, torch.tensor(expected))


@pytest.mark.parametrize("level", ["token", "sequence", "constant"])
def test_without_actions_the_weights_are_zero_not_nan(level):
    weights = loss_weights(torch.zeros(7, dtype=torch.bool), IDS, 3, level=level, constant_length=5)
    assert weights.tolist() == [0] * 7


@pytest.mark.parametrize("level", ["token", "sequence", "constant"])
def test_ranks_that_share_the_divisor_get_the_weights_of_the_whole(level):
    whole = loss_weights(MASK, IDS, 3, level=level, constant_length=5)
    parts = [(MASK[:3], IDS[:3], 1), (MASK[3:], IDS[3:] - 1, 2)]
    divisor = torch.stack([loss_divisor(*part, level=level) for part in parts]).sum()
    split = [loss_weights(*part, level=level, constant_length=5, divisor=divisor) for part in parts]
    torch.testing.assert_close(torch.cat(split), whole)


@pytest.mark.parametrize("length", [None, 0])
def test_the_constant_level_names_the_missing_length(length):
    with pytest.raises(ValueError, match="constant_length"):
        loss_weights(MASK, IDS, 3, level="constant", constant_length=length)
