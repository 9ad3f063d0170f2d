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

    def count(self, name: str, n: int) -> None:
        self.totals[name] += n

    def add(self, result: RolloutResult) -> None:
        for t in result.trajectories:
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
        seconds = 0.0
        for part_sums, part_totals, part_seconds in gather((self.sums, self.totals, self.seconds)):
            sums.update(part_sums)
            totals.update(part_totals)
            seconds = max(seconds, part_seconds)
        n = sums.pop("trajectories", 0)
        metrics = {name: float(x) for name, x in totals.items()}
        metrics["generation_seconds"] = seconds
        metrics["generated_tokens_per_second"] = metrics.pop("generated_tokens", 0.0) / max(seconds, 1e-9)
        if n:
            means = {name: x / n for name, x in sums.items()}
            variance = means.pop("reward_squared") - means["reward"] ** 2
            metrics |= means | {"reward_std": max(variance, 0.0) ** 0.5}
        return metrics
