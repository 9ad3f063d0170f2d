"""Rollouts over processes: engines get their share of the jobs, replicas of the policy what became of theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rl2lightning.rollout.engine import RolloutEngine
from rl2lightning.rollout.loop import Job, RolloutResult
from rl2lightning.rollout.partial import Carried
from rl2lightning.types import RolloutError, counted

T = TypeVar("T")


@dataclass(frozen=True)
class Failure:
    """Why an engine's share was not played."""

    message: str

    @staticmethod
    def of(error: Exception) -> Failure:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return Failure(f"{kind}{error}")


def attempt(fn: Callable[[], T]) -> tuple[T | Failure, Exception | None]:
    """What fn returns, or the failure that all processes are to hear of and the error behind it: for `gather`."""
    try:
        return fn(), None
    except Exception as error:
        return Failure.of(error), error


def gather(outcome: T | Failure, error: Exception | None = None, *, raising: type[Exception] = RolloutError) -> list[T]:
    """The outcomes of all processes of the run, on each of them.

    Raises:
        RolloutError: (or `raising`) one of them is a failure; on all processes, and where it happened caused by
            `error`.
    """
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, outcome)
    if failure := next((x for x in everywhere if isinstance(x, Failure)), None):
        raise raising(failure.message) from error
    return everywhere


def succeed_together(
    fn: Callable[[], None], *, raising: type[Exception] = RolloutError, patience: timedelta | None = None
) -> None:
    """Runs fn on every process of the run.

    Nobody waits for more than a number in host memory. Where fn runs collectives, a process that fails has to have
    taken part in all of them; where that cannot be known, `patience` is how long it waits for the others before it
    raises alone (and its end becomes theirs).

    Raises:
        RolloutError: (or `raising`) fn raised on one of them; on all processes.
    """
    outcome, error = attempt(fn)
    failed = torch.tensor(int(error is not None))
    others = dist.all_reduce(failed, op=dist.ReduceOp.MAX, async_op=True)
    assert others is not None
    if isinstance(outcome, Failure) and patience is not None:
        try:
            others.wait(patience)
        except RuntimeError:  # of gloo, which knows no error of its own for this
            raise raising(outcome.message) from error
    others.wait()
    if failed:
        gather(outcome, error, raising=raising)


class Generators:
    """Deals jobs to engines, and results back.

    An engine has `engine.tensor` consecutive processes, a replica of the policy `replica_size`. The larger of the two
    is a unit: within it the replicas' jobs are put together and dealt to its engines, whole groups to one.

    Example: with 2 processes a replica and engines of one, each of the two plays half of the replica's groups. With 2
    processes an engine and replicas of one, the engine plays the groups of two replicas.

    Every process of the run makes one, at the same point.
    """

    def __init__(self, engine: RolloutEngine, replica_size: int) -> None:
        self.engine, self.replica_size = engine, replica_size
        rank, world, tensor = dist.get_rank(), dist.get_world_size(), engine.tensor
        unit = max(tensor, replica_size)
        if world % unit or unit % tensor or unit % replica_size:
            processes = counted(world, "process", "processes")
            raise ValueError(
                f"engine.init_args.tensor={tensor} does not fit {processes} in replicas of {replica_size} "
                "(context * tensor of the strategy): one of the two has to divide the other, and both the processes"
            )
        self.group: Any = None
        if unit > 1:
            self.group, _ = dist.new_subgroups(unit, backend="gloo")
        self.num_engines = unit // tensor
        self.engine_index, self.replica_index = rank % unit // tensor, rank % unit // replica_size

    def close(self) -> None:
        if self.group is not None and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self.group = None

    def play(
        self, jobs: list[Job], run: Callable[[list[Job], list[Carried]], RolloutResult], carried: Sequence[Carried] = ()
    ) -> RolloutResult:
        """The result of this replica's jobs, on all of its processes; what is carried on, on all of the run.

        Args:
            run: plays jobs, and goes on with what was carried, on this process's engine; called where that is led.
            carried: of earlier rollouts of the whole run, the same on all processes. Groups are dealt to the engines;
                those that are complete now go to the first replica of their engine.

        Raises:
            RolloutError: the run failed on some engine; on all processes of the run.
        """
        share, ours = self.share(jobs), self.share_of_carried(carried)
        outcome, error = attempt(lambda: self.engine.together(lambda: run(share, ours)))
        left = outcome.carried if isinstance(outcome, RolloutResult) else []
        everywhere: list[list[Carried]] = gather(outcome if isinstance(outcome, Failure) else left, error)
        if isinstance(outcome, RolloutResult):
            outcome.carried = []  # all processes have them
        result = self.result(self._gather(outcome)[:: self.engine.tensor], jobs, carried)
        result.carried = sorted((c for part in everywhere for c in part), key=lambda c: c.key)
        return result

    def share(self, jobs: list[Job]) -> list[Job]:
        """The jobs of this process's engine."""
        together = [job for part in self._gather(jobs)[:: self.replica_size] for job in part]
        order = {group: i for i, group in enumerate(dict.fromkeys(job.group_id for job in together))}
        return [job for job in together if order[job.group_id] % self.num_engines == self.engine_index]

    def share_of_carried(self, carried: Sequence[Carried]) -> list[Carried]:
        """What this process's engine goes on with: whole groups, dealt to all engines of the run."""
        order = {group: i for i, group in enumerate(dict.fromkeys(c.trajectory.group_id for c in carried))}
        engines, mine = dist.get_world_size() // self.engine.tensor, dist.get_rank() // self.engine.tensor
        return [c for c in carried if order[c.trajectory.group_id] % engines == mine]

    def result(self, parts: list[RolloutResult], jobs: list[Job], carried: Sequence[Carried] = ()) -> RolloutResult:
        """What became of this replica's jobs, in their order.

        What engines have counted is not told apart by replica: the first of a unit takes it, so that sums are right. So
        it is with trajectories that were carried.
        """
        if len(parts) == 1 and self.group is None:
            return parts[0]
        played = {(t.group_id, t.sample_id): t for part in parts for t in part.trajectories}
        keys = [(job.group_id, job.sample_id) for job in jobs]
        if self.replica_index == 0:
            keys += [c.key for c in carried]
        result = RolloutResult([played[key] for key in keys if key in played])
        result.seconds = max(part.seconds for part in parts)
        for field in fields(RolloutResult):
            values = [getattr(part, field.name) for part in parts] if self.replica_index == 0 else []
            if isinstance(getattr(result, field.name), Counter):
                setattr(result, field.name, sum(values, Counter()))
            elif isinstance(getattr(result, field.name), int):
                setattr(result, field.name, sum(values))
        result.num_truncated = sum(t.truncated for t in result.trajectories)
        return result

    def _gather(self, x: Any) -> list[Any]:
        """One object of each process of the unit."""
        if self.group is None:
            return [x]
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, x, group=self.group)
        return parts
