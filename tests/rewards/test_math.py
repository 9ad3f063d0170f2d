from __future__ import annotations

import sys
from types import ModuleType

import pytest

from rl2lightning.rewards.math import ExactMatch, MathAnswer, last_boxed
from rl2lightning.types import Trajectory


def says(text: str, **row) -> Trajectory:
    return Trajectory(row=row, group_id=0, messages=[{"role": "assistant", "content": text}])


def test_exact_match_strips_both_sides():
    assert ExactMatch()(says(" 95\n", answer="95")) == 1.0
    assert ExactMatch()(says("95", answer=95)) == 1.0
    assert ExactMatch()(says("95.", answer="95")) == 0.0
    assert ExactMatch()(says("", answer="95")) == 0.0


def test_exact_match_of_the_last_match_of_a_pattern():
    reward = ExactMatch(pattern=r"#### *(\S+)")
    assert reward(says("#### 3 no,\n#### 4", answer="4")) == 1.0
    assert reward(says("#### 4 no,\n#### 3", answer="4")) == 0.0
    assert reward(says("4", answer="4")) == 0.0
    assert ExactMatch(pattern=r"\d+")(says("12 or 4", answer="4")) == 1.0
    assert ExactMatch(pattern=r"(a)|b")(says("b", answer="b")) == 0.0  # a group that took no part is no match


def test_exact_match_of_what_is_boxed():
    reward = ExactMatch(boxed=True)
    assert reward(says(r"so \boxed{\frac{1}{2}}.", answer=r"\frac{1}{2}")) == 1.0
    assert reward(says("1/2", answer="1/2")) == 0.0


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"\boxed{1} then \boxed{a{b}c}", "a{b}c"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed {}", None),
        ("nothing", None),
    ],
)
def test_last_boxed(text, inside):
    assert last_boxed(text) == inside


def test_a_row_without_answer_is_an_error():
    with pytest.raises(ValueError, match="no 'answer'"):
        ExactMatch()(says("4"))


def test_settings_that_contradict_or_do_not_parse_are_refused():
    with pytest.raises(ValueError, match="set one"):
        ExactMatch(pattern="a", boxed=True)
    with pytest.raises(ValueError, match=r"pattern='\['"):
        ExactMatch(pattern="[")


def test_math_answer_without_its_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install math-verify"):
        MathAnswer()


@pytest.fixture
def numbers_only(monkeypatch):
    """A stand-in for math-verify that reads numbers and records how it is called."""
    module = ModuleType("math_verify")
    calls = []

    def parse(text, parsing_timeout=5):
        calls.append(("parse", parsing_timeout))
        try:
            return [float(text.strip("$"))]
        except ValueError:
            return []

    def verify(gold, target, timeout_seconds=5):
        calls.append(("verify", timeout_seconds))
        return gold == target

    module.parse, module.verify = parse, verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "math_verify", module)
    return calls


def test_math_answer_compares_values_without_signals(numbers_only):
    reward = MathAnswer()
    assert [reward(says(text, answer="0.5")) for text in ("0.50", "5e-1", "0.6", "half")] == [1.0, 1.0, 0.0, 0.0]
    assert {timeout for _, timeout in numbers_only} == {None}  # signals work in the main thread only


def test_an_answer_that_cannot_be_read_is_an_error_not_a_zero(numbers_only):
    with pytest.raises(ValueError, match="cannot read the answer 'half'"):
        MathAnswer()(says("half", answer="half"))


def test_math_answer_with_the_real_package():
    pytest.importorskip("math_verify")
    reward = MathAnswer()
    assert reward(says(r"so it is $\frac{2}{4}$", answer="0.5")) == 1.0
    assert reward(says(r"$\frac{2}{3}$", answer="0.5")) == 0.0
