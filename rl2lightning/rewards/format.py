"""Rewards of how an answer is written."""

from __future__ import annotations

import re

from rl2lightning.rewards.base import Reward, response_of
from rl2lightning.types import Trajectory


class RegexReward(Reward):
    """1 where the last assistant message matches, else 0.

    Args:
        pattern: searched for anywhere; "." also matches a line break. `^…$` asks for the whole message.
    """

    def __init__(self, pattern: str, name: str = "format", weight: float = 1.0) -> None:
        super().__init__(name=name, weight=weight)
        try:
            self._pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"rewards.pattern='{pattern}' is no regular expression: {error}") from error

    def __call__(self, trajectory: Trajectory) -> float:
        return float(self._pattern.search(response_of(trajectory)) is not None)
