"""Losses, unreduced: [N] per token, [P] per pair, [B] per sequence. One place elsewhere weighs and sums them."""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from rl2lightning.functional.advantages import importance_ratio
from rl2lightning.functional.masked import masked_moments, sequence_mean

# ---------------------------------------------------------------- supervised and reward model


def sft_loss(logps: Tensor) -> Tensor:
    """-logps [N]: SFT on the assistant's tokens, and the NLL term of RPO and ORPO on the chosen ones."""
    return -logps


def reward_model_loss(
    chosen_rewards: Tensor, rejected_rewards: Tensor, *, margin: Tensor | float = 0.0, centering: float = 0.0
) -> Tensor:
    """Bradley-Terry with a margin (Llama 2, arXiv:2307.09288): -log sigmoid(r_c - r_r - margin) + c (r_c + r_r)^2.

    Args:
        chosen_rewards, rejected_rewards: [P].
        margin: [P] or a number, by how much the chosen answer is to win.
        centering: c, pulls rewards towards 0 (arXiv:2312.09244).
    """
    loss = -F.logsigmoid(chosen_rewards - rejected_rewards - margin)
    return loss + centering * (chosen_rewards + rejected_rewards).square()


# ---------------------------------------------------------------- pairs


def preference_margin(chosen_logps: Tensor, rejected_logps: Tensor, chosen_ref: Tensor, rejected_ref: Tensor) -> Tensor:
    """(l_c - ref_c) - (l_r - ref_r), [P]. From sums it is h / beta of DPO; from means per token that of IPO."""
    return (chosen_logps - chosen_ref) - (rejected_logps - rejected_ref)


def dpo_sigmoid(h: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """DPO (arXiv:2305.18290), with label_smoothing > 0 conservative DPO. h: [P], beta times `preference_margin`."""
    return -(1 - label_smoothing) * F.logsigmoid(h) - label_smoothing * F.logsigmoid(-h)


def dpo_robust(h: Tensor, *, label_smoothing: float) -> Tensor:
    """Robust DPO (arXiv:2403.00409): unbiased if a share `label_smoothing` < 1/2 of the labels is flipped. h: [P]."""
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing={label_smoothing} must lie in [0, 0.5) for robust DPO")
    loss = -(1 - label_smoothing) * F.logsigmoid(h) + label_smoothing * F.logsigmoid(-h)
    return loss / (1 - 2 * label_smoothing)


def dpo_hinge(h: Tensor) -> Tensor:
    """max(0, 1 - h) (SLiC, arXiv:2305.10425). h: [P]."""
    return (1 - h).clamp(min=0)


def ipo(mean_margin: Tensor, *, beta: float) -> Tensor:
    """IPO (arXiv:2310.12036): (margin - 1 / (2 beta))^2. mean_margin: [P] `preference_margin` of means per token.

    Departs from the paper, whose sums over tokens make the target depend on the length of the answers.
    """
    return (mean_margin - 1 / (2 * beta)).square()


def simpo(chosen_means: Tensor, rejected_means: Tensor, *, beta: float, gamma: float) -> Tensor:
    """SimPO (arXiv:2405.14734), without a reference, from mean log-probs per token [P]; gamma is the margin."""
    return -F.logsigmoid(beta * (chosen_means - rejected_means) - gamma)


def orpo_odds_ratio(chosen_means: Tensor, rejected_means: Tensor) -> Tensor:
    """-log sigmoid of the difference in log-odds (arXiv:2403.07691), from mean log-probs per token [P].

    ORPO is the `sft_loss` of the chosen tokens plus lambda times this.
    """

    def log_odds(logps: Tensor) -> Tensor:
        return logps - log1mexp(logps)

    return -F.logsigmoid(log_odds(chosen_means) - log_odds(rejected_means))


def log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0 without cancellation (Maechler, 2012); x is held one rounding below 0."""
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    near_zero = x > -math.log(2)
    # either branch is fed a value it can bear, since the gradient of the branch not taken must be finite too
    near = torch.log(-torch.expm1(torch.where(near_zero, x, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(near_zero, -1.0, x)))
    return torch.where(near_zero, near, far)


# ---------------------------------------------------------------- unpaired preferences


def kto_reference_point(total: Tensor, count: Tensor) -> Tensor:
    """z of KTO: the mean of (l - ref) sums over mismatched pairs of the whole step, at least 0, without gradient.

    Args:
        total, count: scalars, summed over all micro-batches and ranks of the step.
    """
    return (total / count.clamp(min=1)).clamp(min=0).detach()


def kto(
    log_ratios: Tensor,
    labels: Tensor,
    reference_point: Tensor | float,
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """KTO (arXiv:2402.01306): desirable 1 - sigmoid(beta (s - z)), undesirable 1 - sigmoid(beta (z - s)), weighted.

    Args:
        log_ratios: [B] s, the sum of logps - ref_logps of each answer.
        labels: [B] bool, True on desirable answers.
        reference_point: scalar z, see `kto_reference_point`.
    """
    sign = torch.where(labels, 1.0, -1.0).to(log_ratios.dtype)
    weight = torch.where(labels, desirable_weight, undesirable_weight).to(log_ratios.dtype)
    return weight * (1 - torch.sigmoid(sign * beta * (log_ratios - reference_point)))


# ---------------------------------------------------------------- policy gradient


def clipped_surrogate(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """-min(w A, clip(w, 1 - clip_low, 1 + clip_high) A), PPO (arXiv:1707.06347)."""
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def is_clipped(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> Tensor:
    """Where `clipped_surrogate` has no gradient: the ratio is already past the bound the advantage pulls it to."""
    return ((ratio > 1 + clip_high) & (advantages > 0)) | ((ratio < 1 - clip_low) & (advantages < 0))


def ppo_clip(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """The clipped surrogate per token, [N].

    Args:
        clip_high: DAPO (arXiv:2503.14476) takes 0.28.
        dual_clip: c > 1; where A < 0 the loss is at most -c A (arXiv:1912.09729).
    """
    loss = clipped_surrogate(importance_ratio(logps - old_logps), advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be greater than 1, or null to leave it out")
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def gspo_ratio(
    logps: Tensor, old_logps: Tensor, action_mask: Tensor, sequence_ids: Tensor, num_sequences: int
) -> Tensor:
    """[N] exp(mean over its sequence of logps - old_logps), the gradient of each reaching its own token alone."""
    means = sequence_mean(logps.detach() - old_logps, action_mask, sequence_ids, num_sequences)
    return importance_ratio(means[sequence_ids] + logps - logps.detach())


def gspo(
    logps: Tensor,
    old_logps: Tensor,
    advantages: Tensor,
    action_mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """GSPO in its per-token form (arXiv:2507.18071, GSPO-token), [N].

    Where a sequence's advantages are equal, the mean over its actions has value and gradient of the loss per sequence.
    """
    ratio = gspo_ratio(logps, old_logps, action_mask, sequence_ids, num_sequences)
    return clipped_surrogate(ratio, advantages, clip_low=clip_low, clip_high=clip_high)


def cispo(logps: Tensor, old_logps: Tensor, advantages: Tensor, *, max_ratio: float = 5.0) -> Tensor:
    """-sg(min(w, max_ratio)) A l (MiniMax-M1, arXiv:2506.13585): the weight is clipped, no token loses its gradient."""
    return -importance_ratio(logps - old_logps).clamp(max=max_ratio).detach() * advantages * logps


def reinforce(logps: Tensor, advantages: Tensor) -> Tensor:
    """-A l, [N]."""
    return -advantages * logps


def mismatch_weights(log_ratio: Tensor, *, mode: Literal["truncate", "mask"], cap: float) -> Tensor:
    """Weight of the policy loss where the engine's probabilities differ from the trainer's; without gradient.

    Args:
        log_ratio: old_logps - rollout_logps per token, or their mean over the actions of each token's sequence.
        mode: `truncate` is min(rho, cap); `mask` keeps rho inside [1 / cap, cap] and drops the token outside.
        cap: C, at least 1.
    """
    if cap < 1:
        raise ValueError(f"cap={cap} of the mismatch correction must be at least 1")
    rho = importance_ratio(log_ratio.detach())
    if mode == "truncate":
        return rho.clamp(max=cap)
    return torch.where((rho >= 1 / cap) & (rho <= cap), rho, 0)


def soft_overlong_penalty(lengths: Tensor, *, max_length: int, cache: int) -> Tensor:
    """DAPO's reward for length: 0 up to max_length - cache, then a ramp down to -1 at max_length and beyond. [S]."""
    if not 0 < cache <= max_length:
        raise ValueError(f"cache={cache} of the overlong penalty must lie in 1 to max_length={max_length}")
    return ((max_length - cache - lengths) / cache).clamp(-1.0, 0.0)


# ---------------------------------------------------------------- critic


def value_loss(values: Tensor, returns: Tensor, old_values: Tensor, *, clip: float | None = None) -> Tensor:
    """max((V - R)^2, (clip(V, V_old +- clip) - R)^2) / 2 per token; without the second term if clip is None. [N]."""
    loss = (values - returns).square()
    if clip is not None:
        held = torch.clamp(values, old_values - clip, old_values + clip)
        loss = torch.maximum(loss, (held - returns).square())
    return loss / 2


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """1 - var(R - V) / var(R) over the mask, a scalar; 1 is a perfect critic, 0 one no better than a constant.

    NaN where all returns are equal: there is nothing to explain.
    """
    _, residual = masked_moments(returns - values, mask)
    _, spread = masked_moments(returns, mask)
    return torch.where(spread > 1e-8, 1 - (residual / spread.clamp(min=1e-8)).square(), torch.nan)
