"""Sums over trajectories that become the means of `rollout/*` and `val/*`, exactly, over all processes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from rl2lightning.rollout.loop import RolloutResult


class RolloutMetrics:
    """Accumulates results; `reduce` gives means over trajectories, and totals of what went wrong.

    Args:
        success_threshold: a trajectory is correct when its first reward is at least this.
    """

    def __init__(self, success_threshold: float) -> None:
        self.success_threshold = success_threshold
        self.sums: Counter[str] = Counter()  # divided by the number of trajectories
        self.totals: Counter[str] = Counter()  # given as they are
        self.seconds = 0.0
        self.oldest = 0  # steps since the earliest weights that sampled a token, of partial rollouts

    def count(self, name: str, n: int) -> None:
        self.totals[name] += n

    def add(self, result: RolloutResult, *, version: int | None = None) -> None:
        """Counts what a rollout gave.

        Args:
            version: optimizer step of the weights now; then the age of what was sampled by earlier ones is measured.
        """
        for t in result.trajectories:
            if version is not None:
                ages = [version - v for v, a in zip(t.weight_versions, t.action_mask, strict=True) if a]
                self.oldest = max(self.oldest, *ages)
                self.sums.update({"age": sum(ages) / len(ages), "resumed": float(len(set(ages)) > 1)})
            sums = {"trajectories": 1, "reward": t.reward, "reward_squared": t.reward**2, "turns": t.num_turns}
            sums |= {"response_length": t.num_actions, "truncated": float(t.truncated)}
            if t.scores:
                sums["accuracy"] = float(next(iter(t.scores.values())) >= self.success_threshold)
            sums |= {f"score/{name}": x for name, x in t.scores.items()}
            self.sums.update(sums)
        self.sums.update(result.counts)
        self.count("reward_errors", result.reward_errors.total())
        self.count("environment_errors", result.environment_errors.total())
        self.count("dropped", result.num_dropped)
        self.count("prompts_too_long", result.num_prompts_too_long)
        self.totals["generated_tokens"] += result.num_tokens
        self.seconds += result.seconds

    def reduce(self, gather: Callable[[Any], list[Any]]) -> dict[str, float]:
        """The metrics over all processes; nothing but the totals where there is no trajectory."""
        sums: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        seconds, oldest = 0.0, 0
        for part in gather((self.sums, self.totals, self.seconds, self.oldest)):
            sums.update(part[0])
            totals.update(part[1])
            seconds, oldest = max(seconds, part[2]), max(oldest, part[3])
        n = sums.pop("trajectories", 0)
        metrics = {name: float(x) for name, x in totals.items()}
        metrics["generation_seconds"] = seconds
        metrics["generated_tokens_per_second"] = metrics.pop("generated_tokens", 0.0) / max(seconds, 1e-9)
        if n:
            means = {name: x / n for name, x in sums.items()}
            if "age" in means:
                metrics["age_max"] = float(oldest)
            variance = means.pop("reward_squared") - means["reward"] ** 2
            metrics |= means | {"reward_std": max(variance, 0.0) ** 0.5}
        return metrics
