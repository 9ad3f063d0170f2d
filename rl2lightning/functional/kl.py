"""Estimators of KL(policy || reference) from the log-probs of sampled tokens (Schulman, joschu.net/blog/kl-approx).

In `loss`, r = logps - ref_logps and the gradient flows; in `reward` and `advantage` the caller passes old log-probs.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


def k1(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """r: unbiased, of either sign; its expected gradient as a loss is 0, so it belongs in the reward."""
    return logps - ref_logps


def k2(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """r^2 / 2: biased and non-negative; its expected gradient as a loss is that of the KL."""
    return (logps - ref_logps).square() / 2


def k3(logps: Tensor, ref_logps: Tensor) -> Tensor:
    """exp(-r) - 1 + r: unbiased, non-negative, of low variance."""
    r = logps - ref_logps
    return torch.expm1(-r) + r  # expm1: near r = 0 the subtraction would leave rounding only


def kl_estimate(logps: Tensor, ref_logps: Tensor, estimator: Estimator) -> Tensor:
    """The estimate by name, per token, in the shape of `logps`."""
    match estimator:
        case "k1":
            return k1(logps, ref_logps)
        case "k2":
            return k2(logps, ref_logps)
        case "k3":
            return k3(logps, ref_logps)
    raise ValueError(f"unknown KL estimator {estimator!r}; set estimator to k1, k2 or k3")
