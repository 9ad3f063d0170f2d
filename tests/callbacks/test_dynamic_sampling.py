"""When refills end, and what they leave of a run; a Trainer of one process is made up."""

from types import SimpleNamespace

import pytest

from rl2lightning.callbacks.dynamic_sampling import refill
from rl2lightning.callbacks.rollout_metrics import RolloutMetrics
from rl2lightning.types import Trajectory


class Run:
    """Groups above 100 are new prompts and worth nothing; those in flight come to their end one a round."""

    def __init__(self, in_flight: list[int]) -> None:
        self.in_flight = in_flight
        self.drawn: list[int] = []
        strategy = SimpleNamespace(gather_objects=lambda x: [x], data_size=1, data_rank=0)
        self.trainer = SimpleNamespace(strategy=strategy, datamodule=self, should_stop=False)

    def draw(self, count: int) -> tuple[list[dict], list[int]]:
        self.drawn.append(count)
        return [{}] * count, [100 + len(self.drawn)] * count

    def collect(self, rows: list[dict], indices: list[int]) -> list[Trajectory]:
        if rows:
            return [Trajectory(row={}, group_id=i) for i in indices]
        return [Trajectory(row={}, group_id=self.in_flight.pop(0))]

    def refill(self, worth: set[int]) -> list[int]:
        kept = refill(
            self.trainer,
            [Trajectory(row={}, group_id=0)],
            RolloutMetrics(0.5),
            num_prompts=1 + len(self.in_flight),
            max_refills=2,
            collect=self.collect,
            keep=lambda group: group[0].group_id in worth,
            before=[],
            carried=lambda: [SimpleNamespace(trajectory=Trajectory(row={}, group_id=i)) for i in self.in_flight],
        )
        return [t.group_id for t in kept]


def test_a_run_goes_on_while_groups_in_flight_may_teach_something() -> None:
    run = Run([1, 2, 3])
    with pytest.warns(UserWarning, match="found 1 of 3 groups in 2 refills"):  # the fourth is in flight
        assert run.refill(worth={2, 3}) == [2]
    assert run.drawn == [1, 1]  # for the one that was filtered, twice
    assert run.in_flight == [3]
    assert not run.trainer.should_stop


@pytest.mark.parametrize("in_flight", [[], [1, 2]])
def test_a_run_ends_where_nothing_is_worth_learning_nor_to_come(in_flight: list[int]) -> None:
    run = Run(in_flight)
    assert run.refill(worth=set()) == []
    assert run.in_flight == []
    assert run.trainer.should_stop
