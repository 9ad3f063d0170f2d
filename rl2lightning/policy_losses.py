"""What a policy-gradient loss is made of: the policy term, the mismatch correction, the KL penalty.

Small frozen settings over `functional/`. They see one micro-batch and return unreduced values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl2lightning.estimators import require
from rl2lightning.functional import advantages as adv
from rl2lightning.functional import kl, losses, masked, ranges
from rl2lightning.types import Sequences


class PolicyLoss(ABC):
    """The policy-gradient term of one micro-batch, from log-probs [N] (0 off actions) and `seqs.advantages`.

    Without `seqs.old_logps` the update is on-policy: old = logps.detach().
    """

    def __call__(self, logps: Tensor, seqs: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [N] and diagnostics [N] without gradient, all unreduced and 0 off actions."""
        advantages = require(seqs, "advantages", self)
        old_logps = logps.detach() if seqs.old_logps is None else seqs.old_logps
        terms = self.terms(logps, old_logps, advantages, seqs)
        if not isinstance(terms, tuple):
            raise ValueError(
                f"{type(self).__name__}.terms returned a {type(terms).__name__}: it must return a pair (loss, logged), "
                "a tensor of one value for each token and a dict, which may be empty, of what is logged"
            )
        loss, diagnostics = terms
        diagnostics["approx_kl"] = kl.k3(old_logps, logps.detach())  # of KL(old || policy): old drew the samples
        mask = seqs.action_mask
        shown = {name: x.detach() * mask if isinstance(x, Tensor) else x for name, x in diagnostics.items()}
        return loss * mask, shown  # a plain number stays one

    @abstractmethod
    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [N] and what to log about it, `ratio` and `clip_fraction` where there are such."""


@dataclass(frozen=True)
class PPOClip(PolicyLoss):
    """The clipped surrogate of PPO and GRPO.

    Args:
        clip_low: how far below 1 the ratio still counts.
        clip_high: how far above 1; DAPO takes 0.28.
        dual_clip: c > 1, where the advantage is negative the loss is at most c times its size; null leaves it out.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        ranges.clip_width("policy_loss.clip_low", self.clip_low)
        ranges.clip_width("policy_loss.clip_high", self.clip_high)
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip={self.dual_clip} must be greater than 1, or null to leave it out")

    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        clip = {"clip_low": self.clip_low, "clip_high": self.clip_high}
        loss = losses.ppo_clip(logps, old_logps, advantages, **clip, dual_clip=self.dual_clip)
        ratio = adv.importance_ratio(logps - old_logps)
        clipped = losses.is_clipped(ratio, advantages, **clip)
        if self.dual_clip is not None:
            clipped = clipped | ((advantages < 0) & (ratio > self.dual_clip))
        return loss, {"ratio": ratio, "clip_fraction": clipped.float()}


@dataclass(frozen=True)
class GSPO(PolicyLoss):
    """The clipped surrogate with one ratio per sequence; use it with the `sequence` level.

    The bounds have names of their own because the command line hands fields of equal name on from one class to the
    next, and PPO's bounds are a thousand times too wide here.

    Args:
        sequence_clip_low: how far below 1 the sequence's ratio still counts.
        sequence_clip_high: how far above 1.
    """

    sequence_clip_low: float = 3e-4
    sequence_clip_high: float = 4e-4

    def __post_init__(self) -> None:
        ranges.clip_width("policy_loss.sequence_clip_low", self.sequence_clip_low)
        ranges.clip_width("policy_loss.sequence_clip_high", self.sequence_clip_high)

    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = losses.gspo_ratio(logps, old_logps, seqs.action_mask, seqs.sequence_ids, len(seqs))
        clip = {"clip_low": self.sequence_clip_low, "clip_high": self.sequence_clip_high}
        loss = losses.clipped_surrogate(ratio, advantages, **clip)
        return loss, {"ratio": ratio, "clip_fraction": losses.is_clipped(ratio, advantages, **clip).float()}


@dataclass(frozen=True)
class CISPO(PolicyLoss):
    """REINFORCE weighted by the clipped ratio: no token loses its gradient.

    Args:
        max_ratio: cap of the weight.
    """

    max_ratio: float = 5.0

    def __post_init__(self) -> None:
        if not self.max_ratio > 0:
            raise ValueError(f"policy_loss.max_ratio={self.max_ratio} caps the weight of a token: set it above 0")

    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = adv.importance_ratio(logps - old_logps)
        loss = losses.cispo(logps, old_logps, advantages, max_ratio=self.max_ratio)
        return loss, {"ratio": ratio, "clip_fraction": (ratio > self.max_ratio).float()}


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """-A log pi: for one update per rollout; with several, the ratio is measured and not corrected."""

    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.reinforce(logps, advantages), {"ratio": adv.importance_ratio(logps - old_logps)}


# ---------------------------------------------------------------- rollout against trainer


@dataclass(frozen=True)
class MismatchCorrection:
    """Weights the policy term by old / rollout probabilities, since engine and trainer differ.

    KL and entropy in the loss are left alone. KL in the reward or the advantage is a part of what the policy term
    maximises, and an expectation over the engine's samples like the rest of the reward, so it is weighted with it.

    Args:
        level: a ratio per `token`, or per `sequence`: exp of the mean over its actions.
        mode: `truncate` caps the ratio, `mask` drops what lies outside [1 / cap, cap].
        cap: C, at least 1.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: float = 2.0

    def __post_init__(self) -> None:
        if not self.cap >= 1:
            raise ValueError(f"cap={self.cap} of the mismatch correction must be at least 1")

    def __call__(self, old_logps: Tensor, seqs: Sequences) -> Tensor:
        """Weights [N] without gradient, 0 off actions. On-policy, old_logps are the current ones."""
        log_ratio = old_logps.detach() - require(seqs, "rollout_logps", self)
        if self.level == "sequence":
            ids = seqs.sequence_ids
            log_ratio = masked.sequence_mean(log_ratio, seqs.action_mask, ids, len(seqs))[ids]
        return losses.mismatch_weights(log_ratio, mode=self.mode, cap=self.cap) * seqs.action_mask


def mismatch_metrics(old_logps: Tensor, seqs: Sequences) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from the engine's; logged always, whether corrected or not.

    Returns:
        unreduced [N], 0 off actions: |old - roll|, exp|old - roll| and the k3 estimate of KL(roll || old).
    """
    rollout_logps = require(seqs, "rollout_logps", "mismatch_metrics")
    mask, old_logps = seqs.action_mask, old_logps.detach()
    gap = (old_logps - rollout_logps).abs()
    return {
        "mismatch_abs": gap * mask,
        "mismatch_exp_abs": adv.importance_ratio(gap) * mask,
        "mismatch_kl": kl.k3(rollout_logps, old_logps) * mask,
    }


def mismatch_max(old_logps: Tensor, seqs: Sequences) -> Tensor:
    """Largest |old - roll| of the actions, a scalar (0 without actions); its reduction over ranks is a maximum."""
    gap = (old_logps.detach() - require(seqs, "rollout_logps", "mismatch_max")).abs() * seqs.action_mask
    return torch.cat([gap, gap.new_zeros(1)]).max()


# ---------------------------------------------------------------- KL to the reference


@dataclass(frozen=True)
class KLPenalty:
    """KL to the reference policy.

    Args:
        coef: weight of the penalty (its first value where a controller adapts it); 0 needs no reference model.
        estimator: k1, k2 or k3; in the loss k1 has no expected gradient.
        place: `loss` adds it to the loss, `reward` subtracts it from each token's reward before the advantages,
            `advantage` from the advantages. The last two compare old log-probs to the reference, without gradient.
    """

    coef: float = 0.0
    estimator: kl.Estimator = "k3"
    place: Literal["loss", "reward", "advantage"] = "loss"

    def __post_init__(self) -> None:
        ranges.not_negative("kl.coef", self.coef)

    @property
    def enabled(self) -> bool:
        return self.coef != 0

    @property
    def needs_old_logps(self) -> bool:
        """Whether old log-probs must be scored even on-policy."""
        return self.enabled and self.place != "loss"

    def __call__(self, logps: Tensor, ref_logps: Tensor) -> Tensor:
        """The estimate per token [n], not yet times a coefficient, which may change during the run."""
        return kl.kl_estimate(logps, ref_logps, self.estimator)
