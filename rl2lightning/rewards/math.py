"""Rewards of a right answer."""

from __future__ import annotations

import logging
import re
from typing import Any

from rl2lightning.rewards.base import Reward, answer_of, response_of
from rl2lightning.types import Trajectory


def last_boxed(text: str) -> str | None:
    r"""What the last `\boxed{…}` holds, inner braces balanced; None without one that is closed."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin:i]
    return None


class ExactMatch(Reward):
    r"""1 where the last assistant message is the row's `answer`, both stripped, else 0.

    Args:
        pattern: compares the last match in the message instead (its first group, if it has groups); no match is 0.
        boxed: compares the contents of the last `\boxed{…}` instead; none is 0.
    """

    def __init__(
        self, pattern: str | None = None, boxed: bool = False, name: str = "exact_match", weight: float = 1.0
    ) -> None:
        super().__init__(name=name, weight=weight)
        if boxed and pattern is not None:
            raise ValueError(f"rewards.pattern='{pattern}' and boxed: true both say where the answer is; set one")
        try:
            self._pattern = None if pattern is None else re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ValueError(f"rewards.pattern='{pattern}' is no regular expression: {error}") from error
        self.boxed = boxed

    def __call__(self, trajectory: Trajectory) -> float:
        found = self._extract(response_of(trajectory))
        return float(found is not None and found.strip() == answer_of(trajectory).strip())

    def _extract(self, text: str) -> str | None:
        if self.boxed:
            return last_boxed(text)
        if self._pattern is None:
            return text
        matches = list(self._pattern.finditer(text))
        if not matches:
            return None
        return matches[-1].group(1 if self._pattern.groups else 0)


class MathAnswer(Reward):
    """1 where the last assistant message and the row's `answer` are the same number or expression, else 0.

    Numbers and LaTeX, compared by the math-verify package. Its time limits rest on signals, which threads do not get,
    so they are off.

    Raises:
        ImportError: at once, without the package.
        ValueError: at a call, for an `answer` that it cannot read.
    """

    def __init__(self, name: str = "math", weight: float = 1.0) -> None:
        super().__init__(name=name, weight=weight)
        try:
            import math_verify
        except ImportError as error:
            raise ImportError("MathAnswer needs the math-verify package: pip install math-verify") from error
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its limits are off
        self._math_verify: Any = math_verify

    def __call__(self, trajectory: Trajectory) -> float:
        answer = answer_of(trajectory)
        gold = self._parse(answer) or self._parse(f"${answer}$")
        if not gold:
            raise ValueError(f"math-verify cannot read the answer '{answer}'; correct it, or use ExactMatch")
        response = self._parse(response_of(trajectory))
        return float(bool(response) and self._math_verify.verify(gold, response, timeout_seconds=None))

    def _parse(self, text: str) -> list[Any]:
        return self._math_verify.parse(text, parsing_timeout=None)
