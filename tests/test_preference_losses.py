"""Each loss against a computation of its own in float64, and the limits in which one loss becomes another."""

import math

import pytest
import torch

from rl2lightning.preference_losses import IPO, ORPO, Hinge, KTOLoss, PreferenceLoss, Robust, Sigmoid, SimPO

t = torch.tensor
torch_close = torch.testing.assert_close


def log_probs(num_pairs=50, seed=0):
    """Chosen, rejected and the reference's of both: [P] each, as means over tokens may be."""
    g = torch.Generator().manual_seed(seed)
    return tuple(-3 * torch.rand(num_pairs, generator=g) - 0.01 for _ in range(4))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def margin(c, r, c_ref, r_ref) -> float:
    return (c - c_ref) - (r - r_ref)


def odds(logp: float) -> float:
    return math.exp(logp) / (1 - math.exp(logp))


PLAIN = {
    Sigmoid(beta=0.7): lambda *x: -math.log(sigmoid(0.7 * margin(*x))),
    Sigmoid(beta=2.0, label_smoothing=0.2): lambda *x: (
        -0.8 * math.log(sigmoid(2 * margin(*x))) - 0.2 * math.log(sigmoid(-2 * margin(*x)))
    ),
    Robust(beta=1.3, flip_rate=0.3): lambda *x: (
        (-0.7 * math.log(sigmoid(1.3 * margin(*x))) + 0.3 * math.log(sigmoid(-1.3 * margin(*x)))) / 0.4
    ),
    Hinge(beta=0.9): lambda *x: max(0.0, 1 - 0.9 * margin(*x)),
    IPO(per_token_beta=0.4): lambda *x: (margin(*x) - 1.25) ** 2,
    SimPO(per_token_beta=2.5, gamma=0.8): lambda c, r, *_: -math.log(sigmoid(2.5 * (c - r) - 0.8)),
    ORPO(lam=0.25): lambda c, r, *_: 0.25 * math.log(1 + odds(r) / odds(c)),
}


@pytest.mark.parametrize("loss", PLAIN, ids=lambda loss: type(loss).__name__)
def test_a_loss_equals_a_plain_computation(loss: PreferenceLoss) -> None:
    given = log_probs()
    expected = [PLAIN[loss](*numbers) for numbers in zip(*(x.double().tolist() for x in given), strict=True)]
    values = loss(*given) if loss.needs_reference else loss(*given[:2], None, None)
    assert values.shape == (50,)
    torch_close(values, t(expected, dtype=torch.float64).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", PLAIN, ids=lambda loss: type(loss).__name__)
def test_every_loss_raises_the_chosen_answer_and_lowers_the_rejected_one(loss: PreferenceLoss) -> None:
    start = t([-1.0]), t([-1.2]), t([-1.1]), t([-1.1])
    chosen, rejected, chosen_ref, rejected_ref = (x.clone().requires_grad_() for x in start)
    up, down = torch.autograd.grad(loss(chosen, rejected, chosen_ref, rejected_ref).sum(), [chosen, rejected])
    assert up.item() < 0 < down.item()


@pytest.mark.parametrize("loss", [Sigmoid(), Sigmoid(label_smoothing=0.3), Robust(flip_rate=0.4)])
def test_the_first_loss_of_a_policy_that_is_its_reference_is_ln_2(loss: PreferenceLoss) -> None:
    chosen, rejected = t([-40.0, -3.0]), t([-51.0, -2.0])
    torch_close(loss(chosen, rejected, chosen, rejected), t([math.log(2)] * 2), rtol=2e-7, atol=0)


def test_robust_and_smoothed_losses_tend_to_the_sigmoid_as_labels_become_sure() -> None:
    given = log_probs()
    plain = Sigmoid(beta=0.5)(*given)
    assert torch.equal(Robust(beta=0.5, flip_rate=0.0)(*given), plain)
    torch_close(Robust(beta=0.5, flip_rate=1e-6)(*given), plain, rtol=0, atol=1e-5)
    assert torch.equal(Sigmoid(beta=0.5, label_smoothing=0.0)(*given), plain)


def test_ipo_is_at_rest_where_the_margin_per_token_is_1_over_2_beta() -> None:
    chosen = t([2.5], requires_grad=True)
    loss = IPO(per_token_beta=0.2)(chosen, t([0.0]), t([0.0]), t([0.0]))
    assert loss.item() == 0
    assert torch.autograd.grad(loss.sum(), chosen)[0].item() == 0
    further = IPO(per_token_beta=0.2)(t([3.5]), t([0.0]), t([0.0]), t([0.0]))
    assert further.item() == pytest.approx(1.0)  # overshooting costs as much as falling short


def test_a_hinge_that_is_won_by_enough_teaches_nothing() -> None:
    chosen = t([10.1, 9.9], requires_grad=True)
    loss = Hinge(beta=0.1)(chosen, t([0.0, 0.0]), t([0.0, 0.0]), t([0.0, 0.0]))
    torch_close(torch.autograd.grad(loss.sum(), chosen)[0], t([0.0, -0.1]))


def test_only_the_losses_without_a_reference_say_that_they_need_none() -> None:
    assert [type(loss).__name__ for loss in PLAIN if not loss.needs_reference] == ["SimPO", "ORPO"]


def test_which_losses_take_means_per_token() -> None:
    assert {type(loss).__name__ for loss in PLAIN if loss.uses_means} == {"IPO", "SimPO", "ORPO"}
    assert [kind(length_normalised=True).uses_means for kind in (Sigmoid, Robust, Hinge)] == [True] * 3


def test_orpo_always_imitates_the_chosen_answers_and_the_others_on_request() -> None:
    assert ORPO(lam=0.0).nll_weight == 1.0
    assert [kind().nll_weight for kind in (Sigmoid, Robust, Hinge, IPO, SimPO)] == [0.0] * 5
    assert [kind(nll_coef=0.5).nll_weight for kind in (Sigmoid, Robust, Hinge, IPO, SimPO)] == [0.5] * 5


def test_rewards_are_what_the_losses_compare() -> None:
    chosen, rejected, chosen_ref, rejected_ref = log_probs()
    for loss, of_margin in ((Sigmoid(beta=0.3), lambda h: -torch.nn.functional.logsigmoid(h)), (Hinge(), None)):
        h = loss.rewards(chosen, chosen_ref) - loss.rewards(rejected, rejected_ref)
        expected = (1 - h).clamp(min=0) if of_margin is None else of_margin(h)
        torch_close(loss(chosen, rejected, chosen_ref, rejected_ref), expected)
    simpo = SimPO(per_token_beta=3.0, gamma=0.5)
    h = simpo.rewards(chosen, None) - simpo.rewards(rejected, None)
    torch_close(simpo(chosen, rejected, None, None), -torch.nn.functional.logsigmoid(h - 0.5))


def test_kto_equals_a_plain_computation() -> None:
    g = torch.Generator().manual_seed(1)
    log_ratios, labels = torch.randn(40, generator=g) * 5, torch.rand(40, generator=g) < 0.4
    loss = KTOLoss(beta=0.3, desirable_weight=1.5, undesirable_weight=0.75)
    expected = [
        1.5 * (1 - sigmoid(0.3 * (s - 1.25))) if label else 0.75 * (1 - sigmoid(0.3 * (1.25 - s)))
        for s, label in zip(log_ratios.double().tolist(), labels.tolist(), strict=True)
    ]
    torch_close(loss(log_ratios, labels, 1.25), t(expected, dtype=torch.float64).float(), rtol=1e-6, atol=1e-6)
    torch_close(loss.rewards(log_ratios), 0.3 * log_ratios)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sigmoid(beta=0.0), "beta=0.0 must be positive"),
        (lambda: Sigmoid(label_smoothing=0.5), r"label_smoothing=0.5 must lie in \[0, 0.5\)"),
        (lambda: Robust(flip_rate=0.5), "flip_rate=0.5 must lie in .* the labels say nothing"),
        (lambda: Hinge(nll_coef=-1.0), "nll_coef=-1.0 must not be negative"),
        (lambda: IPO(per_token_beta=-0.1), "per_token_beta=-0.1 must be positive"),
        (lambda: SimPO(per_token_beta=0.0), "per_token_beta=0.0 must be positive"),
        (lambda: SimPO(gamma=-0.1), "gamma=-0.1 must not be negative"),
        (lambda: ORPO(lam=-0.1), "lam=-0.1 must not be negative"),
        (lambda: KTOLoss(undesirable_weight=-1.0), "undesirable_weight=-1.0 must not be negative"),
        (lambda: KTOLoss(beta=float("nan")), "beta=nan must be positive"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
