import math
import warnings

import pytest
import torch
from hand_made import sequences, t, torch_close

from rl2lightning.estimators import AdvantageEstimator, GroupRelative, VTrace
from rl2lightning.policy_losses import (
    CISPO,
    GSPO,
    KLPenalty,
    MismatchCorrection,
    PolicyLoss,
    PPOClip,
    Reinforce,
    mismatch_max,
    mismatch_metrics,
)
from rl2lightning.types import Sequences


def micro_batch():
    """Two sequences with ratios 1.5, 0.5 and 1 on their actions, and logps that track gradients."""
    seqs = sequences([[0, 1, 1], [0, 1]], advantages=[[0, 2, -1], [0, 3]], old_logps=[[0, -1, -1], [0, -1]])
    logps = t([0.0, -1 + math.log(1.5), -1 + math.log(0.5), 0.0, -1.0], requires_grad=True)
    return logps, seqs


def test_ppo_clip_loss_and_diagnostics_by_hand():
    logps, seqs = micro_batch()
    loss, logged = PPOClip()(logps, seqs)
    torch_close(loss, t([0.0, -2.4, 0.8, 0.0, -3.0]))
    torch_close(logged["ratio"], t([0.0, 1.5, 0.5, 0.0, 1.0]))
    assert logged["clip_fraction"].tolist() == [0, 1, 1, 0, 0]
    kl = [r - 1 - math.log(r) for r in (1.5, 0.5, 1.0)]
    torch_close(logged["approx_kl"], t([0.0, kl[0], kl[1], 0.0, kl[2]]))
    assert loss.requires_grad
    assert not any(x.requires_grad for x in logged.values())


def test_the_clip_is_asymmetric_and_dual_on_request():
    logps, seqs = micro_batch()
    wide, _ = PPOClip(clip_high=0.6)(logps, seqs)
    assert wide[1].item() == pytest.approx(-3.0)
    low = seqs.replace(advantages=-seqs.advantages)
    dual, logged = PPOClip(dual_clip=1.2)(logps, low)
    torch_close(dual, t([0.0, 2.4, -0.5, 0.0, 3.0]))
    assert logged["clip_fraction"].tolist() == [0, 1, 0, 0, 0]
    with pytest.raises(ValueError, match="dual_clip=0.5"):
        PPOClip(dual_clip=0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PPOClip(clip_low=-0.2), r"policy_loss\.clip_low=-0\.2 .* set it to 0 or more"),
        (lambda: PPOClip(clip_high=-0.2), r"policy_loss\.clip_high=-0\.2"),
        (lambda: PPOClip(clip_high=float("nan")), r"policy_loss\.clip_high=nan"),
        (lambda: GSPO(sequence_clip_low=-1e-4), r"policy_loss\.sequence_clip_low=-0\.0001"),
        (lambda: GSPO(sequence_clip_high=-1e-4), r"policy_loss\.sequence_clip_high=-0\.0001"),
        (lambda: CISPO(max_ratio=-5.0), r"policy_loss\.max_ratio=-5\.0 .* set it above 0"),
        (lambda: CISPO(max_ratio=0.0), r"policy_loss\.max_ratio=0\.0"),
    ],
)
def test_bounds_that_no_ratio_can_keep_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()
    PPOClip(clip_low=0.0, clip_high=0.0)  # these can be kept


def test_gspo_uses_one_ratio_per_sequence():
    logps, seqs = micro_batch()
    loss, logged = GSPO()(logps, seqs)
    ratio = math.sqrt(1.5 * 0.5)  # under 1 - clip: clipped where the advantage is negative, not where it is positive
    torch_close(logged["ratio"], t([0.0, ratio, ratio, 0.0, 1.0]))
    torch_close(loss, t([0.0, -2 * ratio, 1 - 3e-4, 0.0, -3.0]))
    assert logged["clip_fraction"].tolist() == [0, 0, 1, 0, 0]


def test_cispo_and_reinforce_by_hand():
    logps, seqs = micro_batch()
    loss, logged = CISPO(max_ratio=1.2)(logps, seqs)
    x = logps.detach()
    torch_close(loss.detach(), t([0.0, -1.2 * 2 * x[1], 0.5 * x[2], 0.0, -3 * x[4]]))
    assert logged["clip_fraction"].tolist() == [0, 1, 0, 0, 0]
    loss, _ = Reinforce()(logps, seqs)
    torch_close(loss.detach(), -seqs.advantages * x)


@pytest.mark.parametrize("policy_loss", [PPOClip(), GSPO(), CISPO(), Reinforce()])
def test_on_policy_every_loss_has_the_gradient_of_reinforce(policy_loss):
    seqs = sequences([[0, 1, 1], [0, 1]], advantages=[[0, 2, 2], [0, -3]])
    logps = t([0.0, -1.0, -2.0, 0.0, -0.5], requires_grad=True)
    loss, logged = policy_loss(logps, seqs)
    (grad,) = torch.autograd.grad(loss.sum(), [logps])
    torch_close(grad, -seqs.advantages)
    assert logged["approx_kl"].tolist() == [0] * 5
    assert logged["ratio"].tolist() == [0, 1, 1, 0, 1]


@pytest.mark.parametrize("policy_loss", [PPOClip(), GSPO(), CISPO(), Reinforce()])
def test_a_dummy_micro_batch_has_loss_zero_and_a_gradient(policy_loss):
    _, seqs = micro_batch()
    logps = torch.zeros(2, requires_grad=True)
    loss, logged = policy_loss(logps, Sequences.dummy(seqs))
    loss.sum().backward()
    assert loss.tolist() == [0, 0]
    assert logps.grad is not None
    assert logps.grad.tolist() == [0, 0]
    assert not any(x.any() for x in logged.values())


def test_a_loss_without_advantages_says_so():
    logps, seqs = micro_batch()
    with pytest.raises(ValueError, match=r"PPOClip.*needs `advantages`"):
        PPOClip()(logps, seqs.replace(advantages=None))


# ---------------------------------------------------------------- mismatch


def mismatched():
    """Ratios old / rollout of 4 and 1 in the first sequence, 1/8 in the second."""
    seqs = sequences([[0, 1, 1], [0, 1]], rollout_logps=[[0, -2, -1], [0, -1]])
    return t([0.0, -2 + math.log(4), -1.0, 0.0, -1 - math.log(8)], requires_grad=True), seqs


def test_mismatch_weights_by_level_and_mode():
    old_logps, seqs = mismatched()
    cases = {
        ("token", "truncate"): [0, 2.5, 1, 0, 0.125],
        ("token", "mask"): [0, 0, 1, 0, 0],
        ("sequence", "truncate"): [0, 2, 2, 0, 0.125],  # geometric mean of 4 and 1
        ("sequence", "mask"): [0, 2, 2, 0, 0],
    }
    for (level, mode), expected in cases.items():
        weights = MismatchCorrection(level, mode, cap=2.5)(old_logps, seqs)
        torch_close(weights, t(expected, dtype=torch.float32))
        assert not weights.requires_grad


def test_equal_policies_are_not_corrected():
    _, seqs = mismatched()
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            weights = MismatchCorrection(level, mode, cap=1.0)(seqs.rollout_logps, seqs)
            assert torch.equal(weights, seqs.action_mask.float())


def test_mismatch_metrics_by_hand():
    old_logps, seqs = mismatched()
    metrics = mismatch_metrics(old_logps, seqs)
    torch_close(metrics["mismatch_abs"], t([0.0, math.log(4), 0.0, 0.0, math.log(8)]))
    torch_close(metrics["mismatch_exp_abs"], t([0.0, 4.0, 1.0, 0.0, 8.0]))
    # r = roll - old: exp(-r) - 1 + r
    torch_close(metrics["mismatch_kl"], t([0.0, 3 - math.log(4), 0.0, 0.0, 1 / 8 - 1 + math.log(8)]))
    assert mismatch_max(old_logps, seqs).item() == pytest.approx(math.log(8))
    assert mismatch_max(torch.zeros(2), Sequences.dummy(seqs)).item() == 0


def test_the_mismatch_kl_is_that_of_the_rollout_policy():
    roll, old = t([0.6, 0.3, 0.1]), t([0.3, 0.3, 0.4])
    seqs = sequences([[0, 1, 1, 1]], rollout_logps=torch.cat([t([0.0]), roll.log()]))
    kl = mismatch_metrics(torch.cat([t([0.0]), old.log()]), seqs)["mismatch_kl"][1:]
    torch_close((roll * kl).sum(), (roll * (roll / old).log()).sum())


def test_mismatch_needs_rollout_logps_and_a_sensible_cap():
    old_logps, seqs = mismatched()
    without = seqs.replace(rollout_logps=None)
    for f in (MismatchCorrection(), mismatch_metrics, mismatch_max):
        with pytest.raises(ValueError, match="needs `rollout_logps`"):
            f(old_logps, without)
    with pytest.raises(ValueError, match="cap=0.9"):
        MismatchCorrection(cap=0.9)


# ---------------------------------------------------------------- KL


def test_the_kl_penalty_is_an_estimate_without_coefficient():
    logps, ref_logps = t([math.log(2.0)]), t([0.0])
    expected = {"k1": math.log(2), "k2": math.log(2) ** 2 / 2, "k3": 0.5 - 1 + math.log(2)}
    for estimator, value in expected.items():
        penalty = KLPenalty(coef=3.0, estimator=estimator)  # pyright: ignore[reportArgumentType]
        assert penalty(logps, ref_logps).item() == pytest.approx(value)


def test_the_place_of_the_kl_penalty_decides_what_is_scored():
    assert not KLPenalty().enabled
    assert KLPenalty(coef=0.1).enabled
    assert not KLPenalty(coef=0.1).needs_old_logps
    assert KLPenalty(coef=0.1, place="reward").needs_old_logps
    assert KLPenalty(coef=0.1, place="advantage").needs_old_logps
    assert not KLPenalty(coef=0.0, place="reward").needs_old_logps
    with pytest.raises(ValueError, match="coef=-1"):
        KLPenalty(coef=-1.0)


# ---------------------------------------------------------------- settings from a configuration file


def test_jsonargparse_builds_the_settings_by_class_path():
    from jsonargparse import ArgumentParser

    class Module:
        def __init__(self, advantage: AdvantageEstimator = GroupRelative(), loss: PolicyLoss = PPOClip()):  # noqa: B008
            self.advantage, self.loss = advantage, loss

    parser = ArgumentParser()
    parser.add_class_arguments(Module, "module")
    advantage, loss = "rl2lightning.estimators.VTrace", "rl2lightning.policy_losses.GSPO"
    args = [f"--module.advantage={advantage}", "--module.advantage.c_bar=2", f"--module.loss={loss}"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of fields that the new class does not have
        module = parser.instantiate_classes(parser.parse_args(args)).module
    assert module.advantage == VTrace(c_bar=2.0)
    assert module.loss == GSPO()  # PPO's bounds are not handed on
