from __future__ import annotations

import numpy as np
import pytest
import torch

from rl2lightning.rewards.base import (
    FunctionReward,
    FunctionTransform,
    GroupNormalisedSum,
    Reward,
    WeightedSum,
    answer_of,
    response_of,
    score,
)
from rl2lightning.types import Trajectory


class Returning(Reward):
    def __init__(self, value, name: str = "r") -> None:
        super().__init__(name=name)
        self.value = value

    def __call__(self, trajectory):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def says(text: str, **row) -> Trajectory:
    return Trajectory(
        row=row, group_id=0, messages=[{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    )


def graded(messages, answer, bonus=0.0):
    return float(messages[-1]["content"] == answer) + bonus


def test_a_function_gets_the_conversation_and_columns_by_name():
    for function in (graded, f"{__file__}:graded"):
        reward = FunctionReward(function, weight=0.5)
        assert (reward.name, reward.weight) == ("graded", 0.5)
        assert [reward(says("4", answer="4")), reward(says("4", answer="4", bonus=0.25))] == [1.0, 1.25]
    assert FunctionReward(graded, name="accuracy").name == "accuracy"


def test_a_function_may_ask_for_the_trajectory_but_cannot_change_its_messages():
    def spoil(messages, trajectory):
        messages[-1]["content"] = "spoilt"
        return trajectory.num_actions

    trajectory = says("4")
    trajectory.action_mask = [False, True, True]
    assert FunctionReward(spoil)(trajectory) == 2
    assert response_of(trajectory) == "4"


def test_names_fit_for_a_log_only():
    with pytest.raises(ValueError, match="reward name 'a b'"):
        Returning(1.0, name="a b")


def test_response_and_answer():
    assert response_of(says("4")) == "4"
    assert response_of(Trajectory(row={}, group_id=0)) == ""
    assert answer_of(says("", answer=4)) == "4"
    with pytest.raises(ValueError, match="the row has no 'answer', only: question"):
        answer_of(says("", question=1))


@pytest.mark.parametrize("value", [1, True, 1.0, np.float32(1.0), np.int64(1), torch.tensor(1.0), torch.tensor([True])])
def test_numbers_of_any_kind_are_fine(value):
    scored = score(says(""), [Returning(value)], on_error="error")
    assert (scored.scores, scored.errors) == ({"r": 1.0}, {})
    assert type(scored.scores["r"]) is float


FAULTS = [
    (None, "none", "returned None"),
    (float("nan"), "nan", "returned nan"),
    (torch.tensor(torch.nan), "nan", "returned tensor"),
    (-float("inf"), "infinite", "returned -inf"),
    ("1", "not_a_number", "returned '1'"),
    (torch.zeros(2), "not_a_number", "returned tensor"),
    (KeyError("x"), "raised_KeyError", "raised KeyError: 'x'"),
]


@pytest.mark.parametrize(("value", "cause", "message"), FAULTS, ids=[str(fault[1:]) for fault in FAULTS])
def test_a_failure_stops_counts_or_drops(value, cause, message):
    rewards = [Returning(value, "bad"), Returning(2.0, "good")]
    with pytest.raises(ValueError, match=rf"reward 'bad' {message}.* on row .*'question': 'Why'.*on_reward_error"):
        score(says("", question="Why"), rewards, on_error="error")
    for policy, dropped in (("zero", False), ("drop", True)):
        scored = score(says(""), rewards, on_error=policy)
        assert scored.scores == {"bad": 0.0, "good": 2.0}
        assert scored.errors == {f"bad/{cause}": 1}
        assert scored.dropped is dropped


GROUPS = torch.tensor([5, 5, 8, 8, 9])
SCORES = {"a": torch.tensor([1.0, 3.0, 0.1, 0.1, 4.0]), "b": torch.tensor([0.0, 10.0, 0.0, -20.0, 4.0])}


def test_weighted_sum():
    total = WeightedSum()(SCORES, GROUPS, {"a": 1.0, "b": 0.5})
    torch.testing.assert_close(total, torch.tensor([1.0, 8.0, 0.1, -9.9, 6.0]))


def test_group_normalised_sum_gives_each_reward_the_same_say():
    total = GroupNormalisedSum()(SCORES, GROUPS, {"a": 1.0, "b": 2.0})
    # of two values the unbiased std is |difference| / sqrt(2), so they normalise to -+1/sqrt(2) whatever their scale;
    # equal values, and a group of one, give 0
    half = 0.5**0.5
    torch.testing.assert_close(total, torch.tensor([-3 * half, 3 * half, 2 * half, -2 * half, 0.0]))


def test_group_normalised_sum_of_equal_rewards_is_not_blown_up_by_rounding():
    scores = {"a": torch.full((3,), 0.1)}
    total = GroupNormalisedSum()(scores, torch.zeros(3, dtype=torch.long), {"a": 1.0})
    assert total.abs().max() < 1e-6


def doubled(scores, group_ids):
    return 2 * scores["a"]


def weighed(scores, weights):
    return scores["a"] * weights["a"]


def scalar(scores):
    return scores["a"].sum()


def test_a_function_transforms():
    torch.testing.assert_close(FunctionTransform(f"{__file__}:doubled")(SCORES, GROUPS, {"a": 1.0}), 2 * SCORES["a"])
    torch.testing.assert_close(FunctionTransform(f"{__file__}:weighed")(SCORES, GROUPS, {"a": 3.0}), 3 * SCORES["a"])


def test_a_function_that_ignores_weights_or_returns_no_vector_is_refused():
    with pytest.raises(ValueError, match="has no parameter `weights`"):
        FunctionTransform(f"{__file__}:doubled")(SCORES, GROUPS, {"a": 2.0})
    with pytest.raises(ValueError, match=r"must return a tensor \[5\], got \[\]"):
        FunctionTransform(f"{__file__}:scalar")(SCORES, GROUPS, {"a": 1.0})
