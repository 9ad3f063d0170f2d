import math

import pytest
import torch

from rl2lightning.functional import losses
from rl2lightning.functional.masked import loss_weights

t = torch.tensor
torch_close = torch.testing.assert_close


def grad(f, x):
    x = x.clone().requires_grad_()
    return torch.autograd.grad(f(x).sum(), [x])[0]


# ---------------------------------------------------------------- supervised and reward model


def test_sft_is_minus_the_log_prob():
    assert losses.sft_loss(t([-1.5, -0.5])).tolist() == [1.5, 0.5]


def test_reward_model_loss_by_hand():
    chosen, rejected = t([1.0, 2.0]), t([1.0, 0.0])
    torch_close(losses.reward_model_loss(chosen, rejected), t([math.log(2), math.log1p(math.exp(-2))]))
    # a margin of 2 makes the second pair a draw; centring adds 0.1 * 2^2
    with_both = losses.reward_model_loss(chosen, rejected, margin=t([0.0, 2.0]), centering=0.1)
    torch_close(with_both, t([math.log(2) + 0.4, math.log(2) + 0.4]))


# ---------------------------------------------------------------- pairs


def test_the_preference_margin_by_hand():
    assert losses.preference_margin(t([-1.0]), t([-4.0]), t([-2.0]), t([-3.0])).item() == 2


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.4])
def test_the_first_dpo_loss_is_ln_2(label_smoothing):
    logps = t([-3.0]), t([-5.0])
    h = 0.1 * losses.preference_margin(*logps, *logps)
    assert losses.dpo_sigmoid(h, label_smoothing=label_smoothing).item() == pytest.approx(math.log(2), abs=1e-7)
    assert losses.dpo_robust(h, label_smoothing=label_smoothing).item() == pytest.approx(math.log(2), abs=1e-6)


def test_dpo_sigmoid_by_hand():
    h = t([math.log(3)])  # sigma(h) = 3/4
    assert losses.dpo_sigmoid(h).item() == pytest.approx(math.log(4 / 3))
    expected = 0.9 * math.log(4 / 3) + 0.1 * math.log(4)
    assert losses.dpo_sigmoid(h, label_smoothing=0.1).item() == pytest.approx(expected)


def test_robust_dpo_by_hand_and_unbiased_under_flipped_labels():
    h, flipped = t([math.log(3)]), 0.2
    expected = (0.8 * math.log(4 / 3) - 0.2 * math.log(4)) / 0.6
    assert losses.dpo_robust(h, label_smoothing=flipped).item() == pytest.approx(expected)
    seen = 0.8 * losses.dpo_robust(h, label_smoothing=flipped) + 0.2 * losses.dpo_robust(-h, label_smoothing=flipped)
    torch_close(seen, losses.dpo_sigmoid(h))


def test_robust_dpo_refuses_labels_that_say_nothing():
    with pytest.raises(ValueError, match="label_smoothing=0.5"):
        losses.dpo_robust(t([0.0]), label_smoothing=0.5)


def test_hinge_ipo_and_simpo_by_hand():
    assert losses.dpo_hinge(t([0.25, 2.0])).tolist() == [0.75, 0.0]
    assert losses.ipo(t([1.0, 5.0]), beta=0.1).tolist() == [16.0, 0.0]  # the target is 1 / (2 * 0.1) = 5
    # 2 (-1 + 2) - 2 = 0
    assert losses.simpo(t([-1.0]), t([-2.0]), beta=2.0, gamma=2.0).item() == pytest.approx(math.log(2))


def test_orpo_odds_ratio_by_hand():
    # odds of 1/2 and 1/4 are 1 and 1/3: sigma(log 3) = 3/4
    loss = losses.orpo_odds_ratio(t([0.5]).log(), t([0.25]).log())
    assert loss.item() == pytest.approx(math.log(4 / 3))


def test_log1mexp_keeps_its_digits_at_both_ends():
    x = torch.tensor([-1e-6, -0.1, -math.log(2), -5.0, -30.0])
    torch_close(losses.log1mexp(x), torch.log1p(-x.double().exp()).float(), rtol=1e-5, atol=0)


def test_orpo_has_finite_gradients_for_certain_and_impossible_answers():
    for x in (t([0.0]), t([-1e-9]), t([-200.0])):
        assert grad(lambda x: losses.orpo_odds_ratio(x, t([-1.0])), x).isfinite().all()
        assert grad(lambda x: losses.orpo_odds_ratio(t([-1.0]), x), x).isfinite().all()


# ---------------------------------------------------------------- unpaired preferences


def test_kto_by_hand():
    # beta (s - z) = 0.5 (4 - 2) = 1 for both; desirable 1 - sigma(1), undesirable 1 - sigma(-1) = sigma(1)
    loss = losses.kto(t([4.0, 4.0]), t([True, False]), t(2.0), beta=0.5, desirable_weight=3.0, undesirable_weight=2.0)
    sigma = 1 / (1 + math.exp(-1))
    torch_close(loss, t([3 * (1 - sigma), 2 * sigma]))


def test_kto_pushes_desirable_answers_up_and_undesirable_ones_down():
    slope = grad(lambda s: losses.kto(s, t([True, False]), t(0.0), beta=0.1), t([0.0, 0.0]))
    torch_close(slope, t([-0.025, 0.025]))


def test_the_kto_reference_point_is_a_global_mean_at_least_zero_without_gradient():
    assert losses.kto_reference_point(t(6.0), t(4)).item() == 1.5
    assert losses.kto_reference_point(t(-6.0), t(4)).item() == 0
    assert losses.kto_reference_point(t(0.0), t(0)).item() == 0
    assert not losses.kto_reference_point(t(6.0, requires_grad=True), t(4)).requires_grad


# ---------------------------------------------------------------- policy gradient


def test_the_ppo_clip_by_hand():
    ratio = t([0.5, 1.1, 1.5, 0.5, 1.1, 1.5])
    advantages = t([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    loss = losses.ppo_clip(ratio.log(), torch.zeros(6), advantages, clip_low=0.2, clip_high=0.28)
    torch_close(loss, t([-1.0, -2.2, -2.56, 1.6, 2.2, 3.0]))
    clipped = losses.is_clipped(ratio, advantages, clip_low=0.2, clip_high=0.28)
    assert clipped.tolist() == [False, False, True, True, False, False]
    slope = grad(lambda x: losses.ppo_clip(x, torch.zeros(6), advantages, clip_low=0.2, clip_high=0.28), ratio.log())
    torch_close(slope, torch.where(clipped, 0.0, -advantages * ratio))


def test_on_policy_ppo_has_the_gradient_of_reinforce():
    logps, advantages = t([-1.0, -2.0]), t([0.5, -3.0])
    torch_close(
        grad(lambda x: losses.ppo_clip(x, logps, advantages), logps),
        grad(lambda x: losses.reinforce(x, advantages), logps),
    )


def test_the_dual_clip_bounds_the_loss_of_negative_advantages_only():
    ratio, advantages = t([10.0, 10.0, 2.0]), t([-1.0, 1.0, -1.0])
    loss = losses.ppo_clip(ratio.log(), torch.zeros(3), advantages, dual_clip=3.0)
    torch_close(loss, t([3.0, -1.2, 2.0]))
    with pytest.raises(ValueError, match="dual_clip=1"):
        losses.ppo_clip(ratio.log(), torch.zeros(3), advantages, dual_clip=1.0)


def test_reinforce_and_cispo_by_hand():
    logps, old_logps, advantages = t([-1.0, -1.0]), t([-1.0, -1.0 - math.log(8)]), t([2.0, 2.0])  # ratios 1 and 8
    torch_close(losses.reinforce(logps, advantages), t([2.0, 2.0]))
    torch_close(losses.cispo(logps, old_logps, advantages, max_ratio=5.0), t([2.0, 10.0]))
    # the clipped weight carries no gradient, the log-prob always does
    torch_close(grad(lambda x: losses.cispo(x, old_logps, advantages), logps), t([-2.0, -10.0]))


IDS = t([0, 0, 0, 1, 1])
ACTIONS = t([False, True, True, False, True])


def test_the_gspo_ratio_is_the_geometric_mean_of_the_sequence():
    logps = t([9.0, 0.2, 0.4, 9.0, -0.5])
    ratio = losses.gspo_ratio(logps, torch.zeros(5), ACTIONS, IDS, 2)
    torch_close(ratio[ACTIONS], t([math.exp(0.3), math.exp(0.3), math.exp(-0.5)]))


@pytest.mark.parametrize("advantages", [[2.0, -1.0], [-2.0, 1.0]])
def test_gspo_has_value_and_gradient_of_the_loss_per_sequence(advantages):
    torch.manual_seed(0)
    logps, old_logps = torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    per_sequence = t(advantages, dtype=torch.float64)
    weights = loss_weights(ACTIONS, IDS, 2, level="sequence").double()

    def ours(x):
        loss = losses.gspo(x, old_logps, per_sequence[IDS], ACTIONS, IDS, 2, clip_low=0.3, clip_high=0.4)
        return (loss * weights).sum()

    def theirs(x):
        gaps = torch.stack([(x - old_logps)[ACTIONS & (i == IDS)].mean() for i in (0, 1)])
        ratio = gaps.exp()
        return -torch.minimum(ratio * per_sequence, ratio.clamp(0.7, 1.4) * per_sequence).mean()

    torch_close(ours(logps), theirs(logps))
    torch_close(grad(ours, logps), grad(theirs, logps))


def test_an_advantage_of_zero_survives_an_infinite_ratio():
    loss = losses.ppo_clip(t([0.0]), t([-1000.0]), t([0.0]))
    assert loss.item() == 0


def test_mismatch_weights_by_hand():
    log_ratio = t([0.1, 0.5, 1.0, 2.0, 3.0]).log().requires_grad_()
    truncated = losses.mismatch_weights(log_ratio, mode="truncate", cap=2.5)
    torch_close(truncated, t([0.1, 0.5, 1.0, 2.0, 2.5]))
    masked = losses.mismatch_weights(log_ratio, mode="mask", cap=2.5)
    torch_close(masked, t([0.0, 0.5, 1.0, 2.0, 0.0]))
    assert not truncated.requires_grad
    assert not masked.requires_grad
    with pytest.raises(ValueError, match="cap=0.5"):
        losses.mismatch_weights(log_ratio, mode="mask", cap=0.5)


def test_the_overlong_penalty_by_hand():
    penalty = losses.soft_overlong_penalty(t([10, 80, 90, 100, 500]), max_length=100, cache=20)
    torch_close(penalty, t([0.0, 0.0, -0.5, -1.0, -1.0]))
    with pytest.raises(ValueError, match="cache=0"):
        losses.soft_overlong_penalty(t([1]), max_length=100, cache=0)


# ---------------------------------------------------------------- critic


def test_the_value_loss_by_hand():
    values, returns, old_values = t([3.0, 3.0]), t([1.0, 4.0]), t([1.0, 1.0])
    torch_close(losses.value_loss(values, returns, old_values), t([2.0, 0.5]))
    # clipped to 1.5: (0.5)^2 against (2)^2 keeps 4; (2.5)^2 against (1)^2 keeps 6.25
    torch_close(losses.value_loss(values, returns, old_values, clip=0.5), t([2.0, 3.125]))


def test_explained_variance_of_a_perfect_a_constant_and_a_half_right_critic():
    returns, mask = t([1.0, 3.0, 99.0]), t([True, True, False])
    assert losses.explained_variance(returns, returns, mask).item() == 1
    assert losses.explained_variance(torch.full((3,), 2.0), returns, mask).item() == 0
    assert losses.explained_variance(t([1.5, 2.5, 0.0]), returns, mask).item() == pytest.approx(0.75)
