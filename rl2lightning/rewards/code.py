"""Rewards of code that runs: the share of tests that an answer passes."""

from __future__ import annotations

import re

from rl2lightning.environments.python_exec import Sandbox, run_tests
from rl2lightning.rewards.base import Reward, response_of
from rl2lightning.types import Trajectory


def last_code_block(text: str) -> str | None:
    """The last block between ```python (or py, or nothing) and ```; None without one."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\n(.*?)```", text, re.DOTALL)
    return blocks[-1] if blocks else None


class CodeTests(Reward):
    """The share of the row's tests that the last code block of the last assistant message passes; without a block 0.

    Each test runs in a sandbox of its own, see `run_tests`.

    Args:
        sandbox: limits and isolation; None: the default ones.
        column: of the row: a list of tests, Python text or {"input", "output"}.
        all_or_nothing: 1 where every test is passed, else 0.
    """

    def __init__(
        self,
        sandbox: Sandbox | None = None,
        column: str = "tests",
        all_or_nothing: bool = False,
        name: str = "tests",
        weight: float = 1.0,
    ) -> None:
        super().__init__(name=name, weight=weight)
        self.sandbox = sandbox or Sandbox()
        self.column, self.all_or_nothing = column, all_or_nothing

    def __call__(self, trajectory: Trajectory) -> float:
        tests = trajectory.row.get(self.column)
        if not tests or isinstance(tests, str):
            raise ValueError(f"the row's '{self.column}' must be a list of tests, got {tests!r:.200}")
        code = last_code_block(response_of(trajectory))
        if code is None:
            return 0.0
        share = run_tests(self.sandbox, code, tests).share
        return float(share == 1) if self.all_or_nothing else share
