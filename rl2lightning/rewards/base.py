"""Rewards, what happens when one fails, and their combination into the number that is trained on."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rl2lightning.types import Trajectory
from rl2lightning.usercode import by_name, load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OnRewardError = Literal["error", "zero", "drop"]


class Reward(ABC):
    """Scores a finished trajectory. Called from several threads at a time.

    Args:
        name: what it is logged and combined under: letters, digits, "_", "-".
        weight: its share where rewards are combined.
    """

    def __init__(self, *, name: str, weight: float = 1.0) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise ValueError(f"reward name '{name}' may hold letters, digits, '_' and '-' only; set its name")
        self.name, self.weight = name, weight

    @abstractmethod
    def __call__(self, trajectory: Trajectory) -> float:
        """The reward, unweighted."""

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:  # noqa: B027 - most have nothing to do in these
        """Called at the start of a run with the policy's tokenizer: raise ValueError where its tokens mean nothing."""

    def prepare(self, device: torch.device) -> None:  # noqa: B027
        """Called on every process before a run's first rollout, with the device it trains on: load a model here."""

    def sleep(self) -> None:  # noqa: B027
        """Called after every rollout: training wants the device's memory until the next trajectory is scored."""

    def release(self) -> None:  # noqa: B027
        """Called at the end of a run: let go of what `prepare` loaded."""


class FunctionReward(Reward):
    """A plain function `(messages, answer, …)`: its parameters are columns of the row by name, and `messages`, the
    whole conversation, and `trajectory`.

    Args:
        function: "package.module.function", "path/file.py:function", or in Python the function itself.
        name: by default the function's.
    """

    def __init__(self, function: str | Callable[..., float], name: str | None = None, weight: float = 1.0) -> None:
        loaded = load_function(function, setting="rewards.function") if isinstance(function, str) else function
        super().__init__(name=name or loaded.__name__, weight=weight)
        self._call = by_name(loaded, given=("messages", "trajectory"), setting="reward")

    def __call__(self, trajectory: Trajectory) -> float:
        messages = [dict(message) for message in trajectory.messages]  # a function may edit what it is handed
        return self._call(trajectory.row, messages=messages, trajectory=trajectory)


def answer_of(trajectory: Trajectory) -> str:
    """The row's `answer` as text.

    Raises:
        ValueError: the row has none.
    """
    answer = trajectory.row.get("answer")
    if answer is None:
        raise ValueError(f"the row has no 'answer', only: {', '.join(sorted(trajectory.row))}")
    return str(answer)


def response_of(trajectory: Trajectory) -> str:
    """What the policy said last, "" if it said nothing."""
    last = (m["content"] for m in reversed(trajectory.messages) if m["role"] == "assistant")
    return next(last, "") or ""


# -- scoring ------------------------------------------------------------------------------------------------------


@dataclass
class Scored:
    """The rewards of one trajectory; `errors` counts what failed, by "reward/cause"."""

    scores: dict[str, float] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)  # what happened, by the same
    dropped: bool = False


def score(trajectory: Trajectory, rewards: Sequence[Reward], *, on_error: OnRewardError) -> Scored:
    """All rewards of a trajectory.

    A reward fails by raising, or by returning NaN, an infinity, None or something that is no number.

    Args:
        on_error: `error` stops the run, `zero` counts the failure and goes on with 0 for that reward, `drop` counts it
            and marks the trajectory as dropped.

    Raises:
        ValueError: a reward failed under `error`: names reward, row and cause.
    """
    result = Scored()
    for reward in rewards:
        error: Exception | None = None
        value: Any = None
        try:
            value = reward(trajectory)
            cause = _fault(value)
        except Exception as raised:
            error, cause = raised, f"raised_{type(raised).__name__}"
        if cause is None:
            result.scores[reward.name] = float(value)
            continue
        what = f"returned {value!r}" if error is None else f"raised {type(error).__name__}: {error}"
        what = f"reward '{reward.name}' {what} on row {_shown(trajectory)}"
        if on_error == "error":
            raise ValueError(f"{what}; mend it, or set on_reward_error to zero or drop") from error
        result.errors[f"{reward.name}/{cause}"] += 1
        result.examples[f"{reward.name}/{cause}"] = what
        result.scores[reward.name] = 0.0
        result.dropped |= on_error == "drop"
    return result


def _fault(value: Any) -> str | None:
    """What is wrong with a reward's value. Booleans and numbers of NumPy or in a one-element tensor are fine."""
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else value
    if not isinstance(value, numbers.Real):
        return "not_a_number"
    if math.isnan(value):
        return "nan"
    return "infinite" if math.isinf(value) else None


def _shown(trajectory: Trajectory) -> str:
    shown = repr(trajectory.row)
    return shown if len(shown) <= 300 else shown[:300] + "…"


# -- combining ----------------------------------------------------------------------------------------------------


class RewardTransform(ABC):
    """Combines the named rewards of all trajectories of a rollout into one reward each."""

    @abstractmethod
    def __call__(self, scores: Mapping[str, Tensor], group_ids: Tensor, weights: Mapping[str, float]) -> Tensor:
        """scores: name -> [n]; group_ids [n]; weights: name -> weight of that reward. Returns [n]."""


@dataclass(frozen=True)
class WeightedSum(RewardTransform):
    """Σ weight · reward."""

    def __call__(self, scores: Mapping[str, Tensor], group_ids: Tensor, weights: Mapping[str, float]) -> Tensor:
        total = torch.zeros(group_ids.shape)
        for name, x in scores.items():
            total += weights[name] * x
        return total


@dataclass(frozen=True)
class GroupNormalisedSum(RewardTransform):
    """Σ weight · (reward − its group's mean) / (its group's std + eps): no reward drowns another by its scale.

    GDPO (arXiv:2601.05242), which goes on to whiten the sum over the batch: that is left to the advantage estimator,
    which should not normalise by group again. Unbiased std; a group of one gives 0.
    """

    eps: float = 1e-6

    def __call__(self, scores: Mapping[str, Tensor], group_ids: Tensor, weights: Mapping[str, float]) -> Tensor:
        _, group = group_ids.unique(return_inverse=True)
        sizes = torch.bincount(group).double()
        total = torch.zeros(group_ids.shape, dtype=torch.float64)
        for name, raw in scores.items():
            x = raw.double()  # so that a group of equal rewards is nearly exactly 0, also after the division
            mean = torch.zeros_like(sizes).index_add(0, group, x) / sizes
            centred = x - mean[group]
            squares = torch.zeros_like(sizes).index_add(0, group, centred**2)
            std = (squares / (sizes - 1).clamp(min=1)).sqrt()
            total += weights[name] * centred / (std[group] + self.eps)
        return total.float()


class FunctionTransform(RewardTransform):
    """A plain function `(scores, group_ids)` or `(scores, group_ids, weights)`, by these names.

    Args:
        function: "package.module.function" or "path/file.py:function".

    Raises:
        ValueError: at a call, if rewards have weights that the function does not ask for.
    """

    def __init__(self, function: str) -> None:
        self.function = function
        loaded = load_function(function, setting="transform.init_args.function")
        self._weighs = "weights" in inspect.signature(loaded).parameters
        self._call = by_name(loaded, given=("scores", "group_ids", "weights"), setting="transform")

    def __call__(self, scores: Mapping[str, Tensor], group_ids: Tensor, weights: Mapping[str, float]) -> Tensor:
        if not self._weighs and any(weight != 1 for weight in weights.values()):
            raise ValueError(f"transform '{self.function}' has no parameter `weights`; add it, or leave weights at 1")
        total = self._call({}, scores=scores, group_ids=group_ids, weights=weights)
        if not isinstance(total, Tensor) or total.shape != group_ids.shape:
            got = list(total.shape) if isinstance(total, Tensor) else type(total).__name__
            raise ValueError(f"transform '{self.function}' must return a tensor {list(group_ids.shape)}, got {got}")
        return total.float()
