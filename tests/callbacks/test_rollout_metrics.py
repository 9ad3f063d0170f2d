from collections import Counter

import pytest

from rl2lightning.callbacks.rollout_metrics import RolloutMetrics
from rl2lightning.rollout.loop import RolloutResult
from rl2lightning.types import Trajectory


def trajectory(reward: float, *, actions: int, truncated: bool = False, **scores: float) -> Trajectory:
    mask = [False] + [True] * actions
    return Trajectory(
        row={}, group_id=0, action_mask=mask, reward=reward, truncated=truncated, num_turns=1, scores=scores
    )


def filled(*results: RolloutResult) -> RolloutMetrics:
    metrics = RolloutMetrics(success_threshold=1.0)
    for result in results:
        metrics.add(result)
    return metrics


ONE = RolloutResult(
    [trajectory(1.0, actions=4, exact=1.0, short=0.5), trajectory(3.0, actions=6, exact=0.0, short=0.1)],
    reward_errors=Counter({"exact/nan": 2, "exact/none": 1}),
    num_tokens=12,
    seconds=2.0,
)
OTHER = RolloutResult(
    [trajectory(2.0, actions=5, truncated=True, exact=2.0, short=0.0)], num_dropped=1, num_tokens=28, seconds=4.0
)


def test_metrics_over_processes_are_those_of_all_trajectories_together() -> None:
    mine, theirs = filled(ONE), filled(OTHER)
    apart = mine.reduce(lambda part: [part, (theirs.sums, theirs.totals, theirs.seconds, theirs.oldest)])
    assert apart == pytest.approx(
        {
            "reward": 2.0,
            "reward_std": (2 / 3) ** 0.5,  # of 1, 3 and 2
            "accuracy": 2 / 3,  # the first score is at least 1 twice
            "score/exact": 1.0,
            "score/short": 0.2,
            "response_length": 5.0,
            "turns": 1.0,
            "truncated": 1 / 3,
            "reward_errors": 3,
            "environment_errors": 0,
            "dropped": 1,
            "prompts_too_long": 0,
            "generation_seconds": 4.0,  # they generate side by side
            "generated_tokens_per_second": 10.0,
        }
    )
    one_after_the_other = filled(ONE, OTHER).reduce(lambda part: [part])
    assert one_after_the_other.pop("generation_seconds") == 6.0
    assert one_after_the_other.pop("generated_tokens_per_second") == pytest.approx(40 / 6)
    assert one_after_the_other == pytest.approx({k: v for k, v in apart.items() if not k.startswith("generat")})


def test_a_process_without_trajectories_does_not_count() -> None:
    nothing = filled()
    both = nothing.reduce(lambda part: [part, (filled(ONE).sums, filled(ONE).totals, 2.0, 0)])
    assert both["reward"] == 2.0
    assert both["score/short"] == pytest.approx(0.3)


def test_without_any_trajectory_only_the_totals_are_left() -> None:
    metrics = filled(RolloutResult(num_dropped=3)).reduce(lambda part: [part])
    assert metrics["dropped"] == 3
    assert "reward" not in metrics
    assert "accuracy" not in metrics
    assert metrics["generated_tokens_per_second"] == 0.0


def test_without_scores_there_is_no_accuracy() -> None:
    assert "accuracy" not in filled(RolloutResult([trajectory(1.0, actions=1)])).reduce(lambda part: [part])


def test_what_an_environment_counts_is_averaged_over_trajectories() -> None:
    played = [trajectory(1.0, actions=4), trajectory(0.0, actions=4)]
    result = RolloutResult(played, counts=Counter({"tool_calls": 3, "tool_errors/timeout": 1}))
    metrics = filled(result, RolloutResult(played)).reduce(lambda part: [part])
    assert (metrics["tool_calls"], metrics["tool_errors/timeout"]) == (0.75, 0.25)


def test_the_age_of_what_was_sampled_is_a_mean_over_trajectories_and_a_maximum_over_processes() -> None:
    def sampled_by(*versions: int) -> RolloutMetrics:
        t = trajectory(1.0, actions=len(versions))
        t.weight_versions = [0, *versions]
        metrics = RolloutMetrics(success_threshold=1.0)
        metrics.add(RolloutResult([t]), version=7)
        return metrics

    mine, theirs = sampled_by(7, 7, 7), sampled_by(3, 3, 5, 7)
    found = mine.reduce(lambda part: [part, (theirs.sums, theirs.totals, theirs.seconds, theirs.oldest)])
    # ages 0 0 0 and 4 4 2 0: means 0 and 2.5
    assert (found["age"], found["age_max"], found["resumed"]) == (1.25, 4, 0.5)
    assert "age_max" not in filled(ONE).reduce(lambda part: [part])
