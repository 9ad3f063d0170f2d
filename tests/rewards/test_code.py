from __future__ import annotations

import pytest

from rl2lightning.environments.python_exec import Sandbox, Verdict
from rl2lightning.rewards import code
from rl2lightning.rewards.code import CodeTests, last_code_block
from rl2lightning.types import Trajectory

SQUARE = "So:\n```python\ndef f(x):\n    return x * x\n```\n"


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(isolation="partial") if not _full() else Sandbox()


def _full() -> bool:
    try:
        Sandbox()
    except ValueError:
        return False
    return True


def said(text: str, **row) -> Trajectory:
    return Trajectory(row=row, group_id=0, messages=[{"role": "assistant", "content": text}])


def test_the_last_block_is_the_answer():
    assert last_code_block("```\na\n```\n or ```py\nb = 1\n``` done") == "b = 1\n"
    assert last_code_block("```json\n{}\n```") is None
    assert last_code_block("no code") is None


def test_the_reward_is_the_share_of_tests_passed(sandbox):
    tests = ["assert f(2) == 4", "assert f(3) == 8"]
    assert CodeTests(sandbox)(said(SQUARE, tests=tests)) == 0.5
    assert CodeTests(sandbox, all_or_nothing=True)(said(SQUARE, tests=tests)) == 0.0
    assert CodeTests(sandbox, all_or_nothing=True, column="checks")(said(SQUARE, checks=tests[:1])) == 1.0
    assert CodeTests(sandbox)(said("x * x", tests=tests)) == 0.0


def test_a_row_without_tests_is_an_error(sandbox, monkeypatch):
    monkeypatch.setattr(code, "run_tests", lambda *args: Verdict(1, 1))
    for row in ({}, {"tests": []}, {"tests": "assert True"}):
        with pytest.raises(ValueError, match="'tests' must be a list of tests"):
            CodeTests(sandbox)(said(SQUARE, **row))
