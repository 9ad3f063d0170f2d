"""Rewards of how long an answer is: tokens of the policy, all turns together."""

from __future__ import annotations

from rl2lightning.rewards.base import Reward
from rl2lightning.types import Trajectory


class SoftOverlong(Reward):
    """DAPO's soft overlong punishment (arXiv:2503.14476): 0 up to `max_length - cache_length` tokens, down to -1 at
    `max_length`, -1 above.

    Args:
        max_length: longest answer that is not punished in full.
        cache_length: length of the ramp.
    """

    def __init__(self, max_length: int, cache_length: int, name: str = "overlong", weight: float = 1.0) -> None:
        super().__init__(name=name, weight=weight)
        if not 0 < cache_length <= max_length:
            raise ValueError(f"rewards.cache_length={cache_length} must lie in [1, max_length={max_length}]")
        self.max_length, self.cache_length = max_length, cache_length

    def __call__(self, trajectory: Trajectory) -> float:
        over = trajectory.num_actions - (self.max_length - self.cache_length)
        return -min(max(over / self.cache_length, 0.0), 1.0)


class LengthPenalty(Reward):
    """−tokens / scale: brevity as an objective of its own.

    Args:
        scale: how many tokens cost 1.
    """

    def __init__(self, scale: float = 1000.0, name: str = "length", weight: float = 1.0) -> None:
        super().__init__(name=name, weight=weight)
        if scale <= 0:
            raise ValueError(f"rewards.scale={scale} must be positive")
        self.scale = scale

    def __call__(self, trajectory: Trajectory) -> float:
        return -trajectory.num_actions / self.scale
