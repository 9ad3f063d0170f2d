"""Advantage estimators: small frozen settings over `functional/advantages.py`.

Advantages are computed once per rollout from all of its sequences, which every rank holds, so their statistics are
global without communication.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from rl2lightning.functional import advantages as adv
from rl2lightning.functional import masked, ranges
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


def require(seqs: Sequences, name: str, user: object) -> Tensor:
    """The field `name` of the sequences, or a clear error of whoever `user` is."""
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
        rewards = require(seqs, "rewards", self)
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

    def __post_init__(self) -> None:
        ranges.share("advantage.gamma", self.gamma)

    def estimate(self, seqs: Sequences, episodes: Episodes, rewards: Tensor) -> tuple[Tensor, None]:
        if self.per_token:
            to_come, _ = adv.monte_carlo(rewards, torch.zeros_like(rewards), episodes.mask, gamma=self.gamma)
            return _whiten(to_come, episodes.mask), None
        total = rewards.sum(1)
        return _whiten(total, torch.ones_like(total, dtype=torch.bool)).unsqueeze(-1) * episodes.mask, None


def _whiten(x: Tensor, mask: Tensor) -> Tensor:
    # in double precision, so that equal values come out as 0 and not as their rounding, blown up
    mean, std = masked.masked_moments(x.double(), mask)
    return masked.whiten(x.double(), mask, mean=mean, std=std).to(x.dtype)


@dataclass(frozen=True)
class CriticEstimator(AdvantageEstimator):
    """Advantages over a critic's values.

    Args:
        gamma: discount per action.
        whiten: bring the advantages to mean 0 and standard deviation 1 over the rollout's actions.
    """

    gamma: float = 1.0
    whiten: bool = True

    def __post_init__(self) -> None:
        ranges.share("advantage.gamma", self.gamma)

    @property
    def needs_values(self) -> bool:
        return True

    @abstractmethod
    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns [R, T]; log_ratio is old_logps - rollout_logps, 0 where it is not needed."""

    def estimate(self, seqs: Sequences, episodes: Episodes, rewards: Tensor) -> tuple[Tensor, Tensor]:
        values, log_ratio = torch.zeros_like(rewards), torch.zeros_like(rewards)
        if self.needs_values:
            values = episodes.pad(require(seqs, "values", self))
        if self.needs_old_logps:
            log_ratio = episodes.pad(require(seqs, "old_logps", self) - require(seqs, "rollout_logps", self))
        advantages, returns = self.over_values(rewards, values, log_ratio, episodes.mask)
        return (_whiten(advantages, episodes.mask) if self.whiten else advantages), returns


@dataclass(frozen=True)
class TraceEstimator(CriticEstimator):
    """Trusts the critic's values the less, the larger `lam`.

    Args:
        lam: trace decay, from 0 to 1.
    """

    lam: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.share("advantage.lam", self.lam)


@dataclass(frozen=True)
class OffPolicyEstimator(TraceEstimator):
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
class GAE(TraceEstimator):
    """Generalised advantage estimation, PPO's.

    Args:
        lam: 0 trusts the critic entirely, 1 not at all; 1 is the safe choice while answers are long and rewards late.
    """

    lam: float = 1.0

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.gae(rewards, values, mask, gamma=self.gamma, lam=self.lam)


@dataclass(frozen=True)
class TDLambda(TraceEstimator):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.positive("advantage.n", self.n)

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

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.positive("advantage.rho_bar", self.rho_bar)
        ranges.positive("advantage.c_bar", self.c_bar)

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

    def __post_init__(self) -> None:
        super().__post_init__()
        ranges.clip_width("advantage.clip", self.clip)

    def over_values(self, rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return adv.clipped_is(rewards, values, log_ratio, mask, gamma=self.gamma, lam=self.lam, clip=self.clip)
