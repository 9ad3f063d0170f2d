"""What a policy-gradient run chooses: advantage estimator, policy loss, mismatch correction, KL penalty.

Small frozen settings over `functional/`. Advantages are computed once per rollout from all of its sequences, which
every rank holds, so their statistics are global without communication. Losses see one micro-batch and return
unreduced values.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl2lightning.functional import advantages as adv
from rl2lightning.functional import kl, losses, masked
from rl2lightning.types import Sequences

# ---------------------------------------------------------------- from flat tokens to episodes and back


@dataclass(frozen=True)
class Episodes:
    """Where the actions of flat sequences go in padded episodes [R, T]: one row per trajectory that acted.

    The sequences of a trajectory are joined in their order, actions only: what happens between turns takes no time.
    Example: sequences `p a a` and `p a e a` (prompt, action, environment) of one trajectory are one row of 4 actions.
    """

    tokens: Tensor  # [A] position of each action in the flat batch
    rows: Tensor  # [A]
    columns: Tensor  # [A]
    mask: Tensor  # [R, T]
    group_ids: Tensor  # [R]
    num_tokens: int

    @staticmethod
    def of(seqs: Sequences) -> Episodes:
        sequence_ids = seqs.sequence_ids
        trajectories = torch.arange(len(seqs)).to(sequence_ids) if seqs.trajectory_ids is None else seqs.trajectory_ids
        tokens = seqs.action_mask.nonzero().squeeze(-1)
        owner = trajectories[sequence_ids[tokens]]
        order = owner.argsort(stable=True)  # stable: a trajectory's tokens stay in their order
        tokens, owner = tokens[order], owner[order]
        _, rows, counts = owner.unique_consecutive(return_inverse=True, return_counts=True)
        starts = counts.cumsum(0) - counts
        columns = torch.arange(len(tokens)).to(tokens) - starts[rows]
        longest = int(counts.max()) if len(counts) else 0
        return Episodes(
            tokens=tokens,
            rows=rows,
            columns=columns,
            mask=torch.arange(longest).to(tokens) < counts.unsqueeze(-1),
            group_ids=seqs.group_ids[sequence_ids[tokens[starts]]],
            num_tokens=seqs.num_tokens,
        )

    def pad(self, x: Tensor) -> Tensor:
        """x [N] to [R, T], 0 on padding."""
        padded = torch.zeros(self.mask.shape, dtype=x.dtype, device=x.device)
        padded[self.rows, self.columns] = x[self.tokens]
        return padded

    def flatten(self, x: Tensor) -> Tensor:
        """x [R, T] to [N], 0 off actions."""
        flat = torch.zeros(self.num_tokens, dtype=x.dtype, device=x.device)
        flat[self.tokens] = x[self.rows, self.columns]
        return flat


def _require(seqs: Sequences, name: str, user: object) -> Tensor:
    x = getattr(seqs, name)
    if x is None:
        raise ValueError(f"{user} needs `{name}` on the sequences; fill it in before calling")
    return x


# ---------------------------------------------------------------- advantages


class AdvantageEstimator(ABC):
    """Turns the rewards of a complete rollout into advantages; rewards lie on actions, [N]."""

    @property
    def needs_values(self) -> bool:
        """Whether a critic must have scored the rollout."""
        return False

    @property
    def needs_old_logps(self) -> bool:
        """Whether old log-probs must be scored even on-policy."""
        return False

    @property
    def corrects_mismatch(self) -> bool:
        """Whether it weighs by old / rollout probabilities itself, so that a `MismatchCorrection` would do so twice."""
        return False

    def __call__(self, seqs: Sequences) -> Sequences:
        """A copy of the rollout with `advantages` [N] (and `returns` [N], the target of a critic, if there is one)."""
        rewards = _require(seqs, "rewards", self)
        if bool((rewards[~seqs.action_mask] != 0).any()):
            raise ValueError("a reward lies off the actions and would be lost; put it on the last token of the turn")
        episodes = Episodes.of(seqs)
        advantages, returns = self.estimate(seqs, episodes, episodes.pad(rewards))
        return seqs.replace(
            advantages=episodes.flatten(advantages),
            returns=None if returns is None else episodes.flatten(returns),
        )

    @abstractmethod
    def estimate(self, seqs: Sequences, episodes: Episodes, rewards: Tensor) -> tuple[Tensor, Tensor | None]:
        """Advantages, and returns or None, from rewards; all [R, T]."""


class GroupEstimator(AdvantageEstimator):
    """One number for all actions of a trajectory: its total reward against those of the other samples of its prompt."""

    @abstractmethod
    def compare(self, returns: Tensor, group_ids: Tensor) -> Tensor:
        """[R] advantages from [R] total rewards."""

    def estimate(self, seqs: Sequences, episodes: Episodes, rewards: Tensor) -> tuple[Tensor, None]:
        alone = int((adv.group_sizes(episodes.group_ids) == 1).sum())
        if alone:
            warnings.warn(
                f"{alone} of {len(rewards)} trajectories are alone in their group and get advantage 0;"
                " draw more samples per prompt or choose an estimator without groups",
                stacklevel=3,
            )
        advantages = self.compare(rewards.sum(1), episodes.group_ids)
        return advantages.unsqueeze(-1) * episodes.mask, None


@dataclass(frozen=True)
class GroupRelative(GroupEstimator):
    """GRPO: (R - mean of the group) / std of the group.

    Args:
        divide_by_std: False leaves the difference as it is (Dr. GRPO).
        unbiased: standard deviation over n - 1 rather than n.
    """

    divide_by_std: bool = True
    unbiased: bool = True

    def compare(self, returns: Tensor, group_ids: Tensor) -> Tensor:
        return adv.group_relative(returns, group_ids, divide_by_std=self.divide_by_std, unbiased=self.unbiased)


@dataclass(frozen=True)
class LeaveOneOut(GroupEstimator):
    """RLOO: R minus the mean of the other samples of the prompt."""

    def compare(self, returns: Tensor, group_ids: Tensor) -> Tensor:
        return adv.leave_one_out(returns, group_ids)


@dataclass(frozen=True)
class BatchWhitened(AdvantageEstimator):
    """REINFORCE++ (arXiv:2501.03262): each action's reward to come, whitened over all actions of the rollout.

    Args:
        gamma: discount per action.
        per_token: False takes each trajectory's total reward, whitened over trajectories.
    """

    gamma: float = 1.0
    per_token: bool = True

    def estimate(self, seqs: Sequences, episodes: Episodes, rewards: Tensor) -> tuple[Tensor, None]:
        if self.per_token:
            to_come, _ = adv.monte_carlo(rewards, torch.zeros_like(rewards), episodes.mask, gamma=self.gamma)
            return _whiten(to_come, episodes.mask), None
        total = rewards.sum(1)
        return _whiten(total, torch.ones_like(total, dtype=torch.bool)).unsqueeze(-1) * episodes.mask, None


def _whiten(x: Tensor, mask: Tensor) -> Tensor:
    mean, std = masked.masked_moments(x, mask)
    return masked.whiten(x, mask, mean=mean, std=std)


@dataclass(frozen=True)
class CriticEstimator(AdvantageEstimator):
    """Advantages over a critic's values.

    Args:
        gamma: discount per action.
        whiten: bring the advantages to mean 0 and standard deviation 1 over the rollout's actions.
    """

    gamma: float = 1.0
    whiten: bool = True

    @property
    def needs_values(self) -> bool:
        return True

    @abstractmethod
    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns [R, T]; log_ratio is old_logps - rollout_logps, 0 where it is not needed."""

    def estimate(self, seqs: Sequences, episodes: Episodes, rewards: Tensor) -> tuple[Tensor, Tensor]:
        values, log_ratio = torch.zeros_like(rewards), torch.zeros_like(rewards)
        if self.needs_values:
            values = episodes.pad(_require(seqs, "values", self))
        if self.needs_old_logps:
            log_ratio = episodes.pad(_require(seqs, "old_logps", self) - _require(seqs, "rollout_logps", self))
        advantages, returns = self.over_values(rewards, values, log_ratio, episodes.mask)
        return (_whiten(advantages, episodes.mask) if self.whiten else advantages), returns


@dataclass(frozen=True)
class OffPolicyEstimator(CriticEstimator):
    """Corrects for the rollout policy not being the old policy, so it excludes a `MismatchCorrection`."""

    @property
    def needs_old_logps(self) -> bool:
        return True

    @property
    def corrects_mismatch(self) -> bool:
        return True


@dataclass(frozen=True)
class MonteCarlo(CriticEstimator):
    """The return to the end minus the value.

    Args:
        use_values: False needs no critic and takes 0 for the values.
    """

    use_values: bool = True

    @property
    def needs_values(self) -> bool:
        return self.use_values

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.monte_carlo(rewards, values, mask, gamma=self.gamma)


@dataclass(frozen=True)
class GAE(CriticEstimator):
    """Generalised advantage estimation, PPO's.

    Args:
        lam: 0 trusts the critic entirely, 1 not at all; 1 is the safe choice while answers are long and rewards late.
    """

    lam: float = 1.0

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True)
class TDLambda(CriticEstimator):
    """The lambda-return minus the value: GAE's numbers by the other road.

    Args:
        lam: 0 bootstraps after one action, 1 never.
    """

    lam: float = 1.0

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.td_lambda(rewards, values, mask, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True)
class NStep(CriticEstimator):
    """n rewards, then the critic.

    Args:
        n: actions before the value stands in for the rest.
    """

    n: int = 5

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.n_step(rewards, values, mask, gamma=self.gamma, n=self.n)


@dataclass(frozen=True)
class VTrace(OffPolicyEstimator):
    """V-trace with the rollout policy as behaviour.

    Args:
        lam: trace decay.
        rho_bar: cap of the ratio on each TD error.
        c_bar: cap of the ratio on the traces.
    """

    lam: float = 1.0
    rho_bar: float = 1.0
    c_bar: float = 1.0

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.vtrace(
            rewards, values, log_ratio, mask, gamma=self.gamma, lam=self.lam, rho_bar=self.rho_bar, c_bar=self.c_bar
        )


@dataclass(frozen=True)
class Retrace(OffPolicyEstimator):
    """Retrace(lambda) on state values with the rollout policy as behaviour.

    Args:
        lam: trace decay.
    """

    lam: float = 1.0

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.retrace(rewards, values, log_ratio, mask, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True)
class ClippedIS(OffPolicyEstimator):
    """GAE times the clipped ratio of old to rollout policy.

    Args:
        lam: trace decay.
        clip: the ratio is held within 1 - clip and 1 + clip.
    """

    lam: float = 1.0
    clip: float = 0.2

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.clipped_is(rewards, values, log_ratio, mask, gamma=self.gamma, lam=self.lam, clip=self.clip)


# ---------------------------------------------------------------- policy losses


class PolicyLoss(ABC):
    """The policy-gradient term of one micro-batch, from log-probs [N] (0 off actions) and `seqs.advantages`.

    Without `seqs.old_logps` the update is on-policy: old = logps.detach().
    """

    @property
    def needs_old_logps(self) -> bool:
        """Whether a second update on the same rollout needs the log-probs from before the first."""
        return True

    def __call__(self, logps: Tensor, seqs: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss [N] and diagnostics [N] without gradient, all unreduced and 0 off actions."""
        advantages = _require(seqs, "advantages", self)
        old_logps = logps.detach() if seqs.old_logps is None else seqs.old_logps
        loss, diagnostics = self.terms(logps, old_logps, advantages, seqs)
        diagnostics["approx_kl"] = kl.k3(old_logps, logps.detach())  # of KL(old || policy): old drew the samples
        mask = seqs.action_mask
        return loss * mask, {name: x.detach() * mask for name, x in diagnostics.items()}

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
        if self.dual_clip is not None and self.dual_clip <= 1:
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

    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ratio = adv.importance_ratio(logps - old_logps)
        loss = losses.cispo(logps, old_logps, advantages, max_ratio=self.max_ratio)
        return loss, {"ratio": ratio, "clip_fraction": (ratio > self.max_ratio).float()}


@dataclass(frozen=True)
class Reinforce(PolicyLoss):
    """-A log pi: no ratio, for one update per rollout."""

    @property
    def needs_old_logps(self) -> bool:
        return False

    def terms(
        self, logps: Tensor, old_logps: Tensor, advantages: Tensor, seqs: Sequences
    ) -> tuple[Tensor, dict[str, Tensor]]:
        return losses.reinforce(logps, advantages), {"ratio": adv.importance_ratio(logps - old_logps)}


# ---------------------------------------------------------------- rollout against trainer


@dataclass(frozen=True)
class MismatchCorrection:
    """Weights the policy term (not KL, not entropy) by old / rollout probabilities, since engine and trainer differ.

    Args:
        level: a ratio per `token`, or per `sequence`: exp of the mean over its actions.
        mode: `truncate` caps the ratio, `mask` drops what lies outside [1 / cap, cap].
        cap: C, at least 1.
    """

    level: Literal["token", "sequence"] = "token"
    mode: Literal["truncate", "mask"] = "truncate"
    cap: float = 2.0

    def __post_init__(self) -> None:
        if self.cap < 1:
            raise ValueError(f"cap={self.cap} of the mismatch correction must be at least 1")

    def __call__(self, old_logps: Tensor, seqs: Sequences) -> Tensor:
        """Weights [N] without gradient, 0 off actions. On-policy, old_logps are the current ones."""
        log_ratio = old_logps.detach() - _require(seqs, "rollout_logps", self)
        if self.level == "sequence":
            ids = seqs.sequence_ids
            log_ratio = masked.sequence_mean(log_ratio, seqs.action_mask, ids, len(seqs))[ids]
        return losses.mismatch_weights(log_ratio, mode=self.mode, cap=self.cap) * seqs.action_mask


def mismatch_metrics(old_logps: Tensor, seqs: Sequences) -> dict[str, Tensor]:
    """How far the trainer's log-probs are from the engine's; logged always, whether corrected or not.

    Returns:
        unreduced [N], 0 off actions: |old - roll|, exp|old - roll| and the k3 estimate of KL(roll || old).
    """
    rollout_logps = _require(seqs, "rollout_logps", "mismatch_metrics")
    mask, old_logps = seqs.action_mask, old_logps.detach()
    gap = (old_logps - rollout_logps).abs()
    return {
        "mismatch_abs": gap * mask,
        "mismatch_exp_abs": adv.importance_ratio(gap) * mask,
        "mismatch_kl": kl.k3(rollout_logps, old_logps) * mask,
    }


def mismatch_max(old_logps: Tensor, seqs: Sequences) -> Tensor:
    """Largest |old - roll| of the actions, a scalar (0 without actions); its reduction over ranks is a maximum."""
    gap = (old_logps.detach() - _require(seqs, "rollout_logps", "mismatch_max")).abs() * seqs.action_mask
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
        if self.coef < 0:
            raise ValueError(f"kl.coef={self.coef} must not be negative")

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
