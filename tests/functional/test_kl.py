import math

import pytest
import torch

from rl2lightning.functional.kl import k1, k2, k3, kl_estimate


def test_the_estimators_by_hand():
    logps, ref_logps = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])  # r = log 2
    assert k1(logps, ref_logps).item() == pytest.approx(math.log(2))
    assert k2(logps, ref_logps).item() == pytest.approx(math.log(2) ** 2 / 2)
    assert k3(logps, ref_logps).item() == pytest.approx(0.5 - 1 + math.log(2))


def test_all_are_zero_for_equal_policies():
    logps = torch.tensor([-0.3, -2.0])
    for estimator in ("k1", "k2", "k3"):
        assert kl_estimate(logps, logps, estimator).tolist() == [0, 0]


@pytest.mark.parametrize("estimator", [k1, k3])
def test_k1_and_k3_are_unbiased(estimator):
    p, q = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.3, 0.3, 0.4])
    expectation = (p * estimator(p.log(), q.log())).sum()
    torch.testing.assert_close(expectation, (p * (p / q).log()).sum())


def test_k2_and_k3_never_go_negative():
    torch.manual_seed(0)
    a, b = -torch.rand(1000), -torch.rand(1000)
    assert (k2(a, b) >= 0).all()
    assert (k3(a, b) >= -1e-7).all()


def test_k3_keeps_its_digits_near_zero():
    # r^2 / 2 = 5e-9 would drown in the rounding of exp(-r) - 1 + r
    assert k3(torch.tensor([1e-4]), torch.tensor([0.0])).item() == pytest.approx(5e-9, rel=1e-2)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 1.0), ("k2", 0.5), ("k3", 1 - math.exp(-0.5))])
def test_gradients_as_a_loss(estimator, expected):
    logps = torch.tensor([0.5], requires_grad=True)
    kl_estimate(logps, torch.zeros(1), estimator).sum().backward()
    assert logps.grad is not None
    assert logps.grad.item() == pytest.approx(expected)


def test_an_unknown_estimator_is_named():
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")  # pyright: ignore[reportArgumentType]
