import math

import pytest
import torch
from hand_made import rollout, sequences, t, torch_close

from rl2lightning.estimators import (
    GAE,
    BatchWhitened,
    ClippedIS,
    Episodes,
    GroupRelative,
    LeaveOneOut,
    MonteCarlo,
    NStep,
    Retrace,
    TDLambda,
    VTrace,
)
from rl2lightning.functional.advantages import gae
from rl2lightning.types import Sequences

WITHOUT_CRITIC = [GroupRelative(), LeaveOneOut(), BatchWhitened(), MonteCarlo(use_values=False)]
WITH_CRITIC = [MonteCarlo(), GAE(), TDLambda(), NStep(), VTrace(), Retrace(), ClippedIS()]


# ---------------------------------------------------------------- episodes


def test_turns_and_sequences_of_a_trajectory_are_joined_actions_only():
    # trajectory 7 is sequences 0 and 2, trajectory 3 is sequence 1
    seqs = sequences([[0, 1, 0, 1], [0, 1], [0, 0, 1]], [4, 5, 4], trajectory_ids=t([7, 3, 7]))
    x = torch.arange(1.0, 10.0)
    episodes = Episodes.of(seqs)
    assert episodes.pad(x).tolist() == [[6, 0, 0], [2, 4, 9]]
    assert episodes.mask.tolist() == [[True, False, False], [True, True, True]]
    assert episodes.group_ids.tolist() == [5, 4]


def test_flattening_undoes_padding_on_the_actions():
    seqs = rollout()
    x = torch.randn(seqs.num_tokens)
    episodes = Episodes.of(seqs)
    assert torch.equal(episodes.flatten(episodes.pad(x)), x * seqs.action_mask)


def test_a_sequence_without_actions_is_no_episode():
    seqs = sequences([[0, 1], [0, 0]], [0, 0], rewards=[[0, 1], [0, 0]])
    assert Episodes.of(seqs).mask.shape == (1, 1)


# ---------------------------------------------------------------- advantages


def test_group_relative_by_hand_on_every_action():
    seqs = sequences([[0, 1, 1], [0, 1], [0, 0, 1]], [0, 0, 0], rewards=[[0, 1, 1], [0, 0], [0, 0, 4]])
    out = GroupRelative()(seqs)  # returns 2, 0, 4: mean 2, unbiased std 2
    torch_close(out.advantages, t([0.0, 0.0, 0.0, 0.0, -1.0, 0.0, 0.0, 1.0]))
    assert out.returns is None
    biased = GroupRelative(unbiased=False)(seqs).advantages
    torch_close(biased[-1], t(2 / math.sqrt(8 / 3)))
    centred = GroupRelative(divide_by_std=False)(seqs).advantages
    torch_close(centred, t([0.0, 0.0, 0.0, 0.0, -2.0, 0.0, 0.0, 2.0]))


def test_leave_one_out_by_hand():
    seqs = sequences([[0, 1], [0, 1], [0, 1]], [0, 0, 0], rewards=[[0, 1], [0, 2], [0, 6]])
    torch_close(LeaveOneOut()(seqs).advantages[1::2], t([-3.0, -1.5, 4.5]))


def test_every_turn_of_a_trajectory_gets_its_credit():
    seqs = sequences([[0, 1, 0, 1], [0, 1, 0, 1]], [0, 0], rewards=[[0, 0, 0, 1], [0, 0, 0, 0]])
    advantages = LeaveOneOut()(seqs).advantages
    assert advantages.tolist() == [0, 1, 0, 1, 0, -1, 0, -1]


def test_a_split_trajectory_counts_once_in_its_group():
    joined = sequences([[0, 1, 0, 1], [0, 1]], [0, 0], rewards=[[0, 1, 0, 2], [0, 0]])
    split = sequences(
        [[0, 1], [0, 1], [0, 0, 1]], [0, 0, 0], rewards=[[0, 1], [0, 0], [0, 0, 2]], trajectory_ids=t([0, 1, 0])
    )
    one, two = GroupRelative()(joined).advantages, GroupRelative()(split).advantages
    torch_close(two[t([1, 6, 3])], one[t([1, 3, 5])])


@pytest.mark.parametrize("estimator", [GroupRelative(), LeaveOneOut()])
def test_groups_of_one_get_advantage_zero_with_one_warning(estimator):
    seqs = sequences([[0, 1]] * 4, [0, 1, 2, 2], rewards=[[0, 1], [0, 2], [0, 3], [0, 5]])
    with pytest.warns(UserWarning, match="2 of 4 trajectories are alone") as caught:
        advantages = estimator(seqs).advantages
    assert len(caught) == 1
    assert advantages[[1, 3]].tolist() == [0, 0]
    assert advantages[7] > 0


def test_batch_whitening_takes_the_reward_to_come_over_all_actions():
    # rewards to come 3 2 and 1: mean 2, unbiased std 1
    seqs = sequences([[0, 1, 1], [0, 1]], rewards=[[0, 1, 2], [0, 1]])
    torch_close(BatchWhitened()(seqs).advantages, t([0.0, 1.0, 0.0, 0.0, -1.0]))
    # total rewards 3 and 1: mean 2, std sqrt 2
    half = math.sqrt(0.5)
    torch_close(BatchWhitened(per_token=False)(seqs).advantages, t([0.0, half, half, 0.0, -half]))


def test_gae_is_the_function_on_the_joined_turns():
    seqs = rollout()
    out = GAE(gamma=0.9, lam=0.8, whiten=False)(seqs)
    rewards, values = seqs.rewards[t([1, 2, 4])], seqs.values[t([1, 2, 4])]
    advantages, returns = gae(rewards[None], values[None], torch.ones(1, 3, dtype=torch.bool), gamma=0.9, lam=0.8)
    torch_close(out.advantages[:5], t([0.0, *advantages[0, :2].tolist(), 0.0, advantages[0, 2].item()]))
    torch_close(out.returns[:5], t([0.0, *returns[0, :2].tolist(), 0.0, returns[0, 2].item()]))


@pytest.mark.parametrize("estimator", WITH_CRITIC)
def test_whitened_advantages_have_mean_0_and_std_1_on_actions_and_returns_are_untouched(estimator):
    seqs = rollout()
    out, plain = estimator(seqs), type(estimator)(whiten=False)(seqs)
    assert out.advantages[seqs.action_mask].mean().abs() < 1e-6
    assert (out.advantages[seqs.action_mask].std() - 1).abs() < 1e-5
    torch_close(out.returns, plain.returns)
    assert not torch.allclose(out.advantages, plain.advantages)


def test_with_equal_policies_the_off_policy_estimators_are_gae():
    seqs = rollout()
    seqs = seqs.replace(rollout_logps=seqs.old_logps)
    expected = GAE(gamma=0.9, whiten=False)(seqs)
    for estimator in (VTrace, Retrace, ClippedIS, TDLambda, MonteCarlo):
        out = estimator(gamma=0.9, whiten=False)(seqs)
        torch_close(out.advantages, expected.advantages)
        torch_close(out.returns, expected.returns)


def test_the_ratio_of_the_off_policy_estimators_is_old_over_rollout():
    # one action, reward 1, value 0, old / rollout = 1.1
    seqs = sequences(
        [[0, 1]], rewards=[[0, 1]], values=[[0, 0]], old_logps=[[0, math.log(1.1)]], rollout_logps=[[0, 0]]
    )
    assert ClippedIS(whiten=False)(seqs).advantages[1].item() == pytest.approx(1.1)
    assert VTrace(whiten=False, rho_bar=2.0)(seqs).advantages[1].item() == pytest.approx(1.1)
    assert NStep(n=1, whiten=False)(seqs).advantages[1].item() == 1


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC + WITH_CRITIC)
def test_advantages_depend_neither_on_order_nor_on_what_is_off_the_actions(estimator):
    seqs = rollout()
    out = estimator(seqs)
    order = [2, 0, 3, 1]
    torch_close(estimator(seqs.select(order)).advantages, out.select(order).advantages)
    noisy = seqs.replace(values=torch.where(seqs.action_mask, seqs.values, 77.0))
    torch_close(estimator(noisy).advantages, out.advantages)
    assert not out.advantages[~seqs.action_mask].any()
    assert seqs.advantages is None


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC + WITH_CRITIC)
def test_an_estimator_asks_for_what_it_needs_and_for_no_more(estimator):
    seqs = rollout()
    assert estimator.needs_values == (estimator in WITH_CRITIC)
    assert estimator.needs_old_logps == estimator.corrects_mismatch == (estimator in WITH_CRITIC[-3:])
    estimator(seqs.replace(values=seqs.values if estimator.needs_values else None))
    if estimator.needs_values:
        with pytest.raises(ValueError, match="needs `values`"):
            estimator(seqs.replace(values=None))
    if estimator.needs_old_logps:
        with pytest.raises(ValueError, match="needs `rollout_logps`"):
            estimator(seqs.replace(rollout_logps=None))


@pytest.mark.parametrize("estimator", WITHOUT_CRITIC + WITH_CRITIC)
def test_a_rollout_without_actions_has_no_advantages(estimator):
    seqs = Sequences.dummy(rollout())
    assert estimator(seqs).advantages.tolist() == [0, 0]


def test_a_reward_off_the_actions_is_an_error_not_lost():
    with pytest.raises(ValueError, match="off the actions"):
        GroupRelative()(sequences([[0, 1, 0], [0, 1, 0]], [0, 0], rewards=[[0, 0, 1], [0, 0, 0]]))


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("reward", [0.1, 0.7, -0.35])  # none of which a float holds exactly
def test_whitened_equal_rewards_are_zero_and_not_their_rounding(reward, per_token):
    seqs = sequences([[0, 1, 1], [0, 1, 1, 1]], [0, 0], rewards=[[0, 0, reward], [0, 0, 0, reward]])
    assert BatchWhitened(per_token=per_token)(seqs).advantages.abs().max() < 1e-3


@pytest.mark.parametrize("value", [-0.1, 1.5, float("nan")])
@pytest.mark.parametrize("kind", [GAE, TDLambda, VTrace, Retrace, ClippedIS])
def test_discounts_and_traces_lie_between_0_and_1(kind, value):
    for name in ("gamma", "lam"):
        with pytest.raises(ValueError, match=rf"advantage\.{name}={value} must lie between 0 and 1"):
            kind(**{name: value})
        assert {getattr(kind(**{name: x}), name) for x in (0.0, 1.0)} == {0.0, 1.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MonteCarlo(gamma=1.1), r"advantage\.gamma=1\.1 must lie"),
        (lambda: NStep(gamma=-1.0), r"advantage\.gamma=-1\.0 must lie"),
        (lambda: BatchWhitened(gamma=2.0), r"advantage\.gamma=2\.0 must lie"),
        (lambda: NStep(n=0), r"advantage\.n=0 must be positive"),
        (lambda: VTrace(rho_bar=0.0), r"advantage\.rho_bar=0\.0 must be positive"),
        (lambda: VTrace(c_bar=-1.0), r"advantage\.c_bar=-1\.0 must be positive"),
        (lambda: ClippedIS(clip=-0.2), r"advantage\.clip=-0\.2 .* set it to 0 or more"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
