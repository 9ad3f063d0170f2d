"""Jobs dealt to engines and results dealt back, on one process; two are in tests/rollout/vllm_cases.py."""

from __future__ import annotations

from collections import Counter

import pytest
import torch.distributed as dist

from rl2lightning.callbacks.generation import Generators
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutResult
from rl2lightning.rollout.partial import Carried
from rl2lightning.types import RolloutError, Trajectory

JOBS = [Job({}, group_id=i, sample_id=k) for i in (7, 3, 5) for k in range(2)]


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch):
    """As on process `rank` of `world`, without the others; what `play` would gather is handed in."""

    def make(rank: int, world: int, *, tensor: int, replica_size: int) -> Generators:
        engine = HFEngine()
        engine.tensor = tensor
        monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
        monkeypatch.setattr(dist, "new_subgroups", lambda size, backend: ("a group", None))
        return Generators(engine, replica_size)

    return make


@pytest.mark.parametrize(
    ("world", "tensor", "replica_size"), [(8, 1, 1), (8, 1, 4), (8, 4, 1), (8, 2, 4), (8, 4, 2), (8, 8, 8)]
)
def test_every_job_is_played_by_one_engine_and_groups_stay_whole(generators, monkeypatch, world, tensor, replica_size):
    def jobs_of(process: int) -> list[Job]:
        return [Job({}, 100 * (process // replica_size) + job.group_id, job.sample_id) for job in JOBS]

    unit = max(tensor, replica_size)
    played: list[list[Job]] = []
    for rank in range(world):
        generator = generators(rank, world, tensor=tensor, replica_size=replica_size)
        first = rank // unit * unit
        everyone = [jobs_of(process) for process in range(first, first + unit)]
        monkeypatch.setattr(generator, "_gather", lambda x, everyone=everyone: everyone)
        played.append(generator.share(jobs_of(rank)))
    for leader in range(0, world, tensor):
        assert all(played[leader] == played[follower] for follower in range(leader, leader + tensor))
    by_engine = played[::tensor]
    keys = [(job.group_id, job.sample_id) for jobs in by_engine for job in jobs]
    wanted = [(job.group_id, job.sample_id) for process in range(0, world, replica_size) for job in jobs_of(process)]
    assert sorted(keys) == sorted(wanted)
    for jobs in by_engine:
        assert all(count == 2 for count in Counter(job.group_id for job in jobs).values())


def test_results_come_in_the_order_of_the_jobs_and_counts_once(generators):
    def played(jobs: list[Job], **counts) -> RolloutResult:
        return RolloutResult([Trajectory({}, job.group_id, job.sample_id) for job in jobs], **counts)

    parts = [
        played(JOBS[3:5], num_tokens=5, num_dropped=1, reward_errors=Counter(a=1), seconds=2.0),
        played(JOBS[:3], num_tokens=7, reward_errors=Counter(a=1, b=1), seconds=1.0),
    ]
    first = generators(0, 2, tensor=1, replica_size=2).result(parts, JOBS)
    assert [(t.group_id, t.sample_id) for t in first.trajectories] == [(7, 0), (7, 1), (3, 0), (3, 1), (5, 0)]
    assert (first.num_tokens, first.num_dropped, first.reward_errors, first.seconds) == (12, 1, Counter(a=2, b=1), 2.0)
    second = generators(1, 2, tensor=2, replica_size=1).result([played(JOBS, num_tokens=9)], JOBS[2:4])
    assert [(t.group_id, t.sample_id) for t in second.trajectories] == [(3, 0), (3, 1)]
    assert second.num_tokens == 0  # the other replica has counted it


@pytest.mark.parametrize(("world", "tensor"), [(1, 1), (4, 1), (8, 2), (8, 8)])
def test_what_is_carried_goes_to_one_engine_each_by_whole_groups(generators, world, tensor):
    carried = [Carried(Trajectory({}, group, sample), began=0) for group in (3, 8, 9, 11, 20) for sample in range(2)]
    ours = [generators(rank, world, tensor=tensor, replica_size=1).share_of_carried(carried) for rank in range(world)]
    assert all(ours[rank] == ours[rank // tensor * tensor] for rank in range(world))
    by_engine = [[c.key for c in part] for part in ours[::tensor]]
    assert sorted(key for keys in by_engine for key in keys) == [c.key for c in carried]
    assert all((group, 1 - sample) in keys for keys in by_engine for group, sample in keys)
    assert max(map(len, by_engine)) - min(map(len, by_engine)) <= 2  # a group


def test_carried_trajectories_that_ended_go_to_the_first_replica_of_their_engine(generators):
    played = RolloutResult([Trajectory({}, 2, 0), Trajectory({}, 7, 0), Trajectory({}, 5, 1)])
    carried = [Carried(Trajectory({}, 2, 0), began=0), Carried(Trajectory({}, 4, 0), began=0)]
    first = generators(0, 2, tensor=2, replica_size=1).result([played], [Job({}, 7, 0)], carried)
    second = generators(1, 2, tensor=2, replica_size=1).result([played], [Job({}, 5, 1)], carried)
    assert [(t.group_id, t.sample_id) for t in first.trajectories] == [(7, 0), (2, 0)]
    assert [(t.group_id, t.sample_id) for t in second.trajectories] == [(5, 1)]


@pytest.mark.parametrize(("world", "tensor", "replica_size"), [(4, 3, 1), (6, 2, 3), (2, 4, 1)])
def test_engines_that_do_not_fit_the_processes_are_refused(generators, world, tensor, replica_size):
    with pytest.raises(
        ValueError, match=f"tensor={tensor} does not fit {world} processes in replicas of {replica_size}"
    ):
        generators(0, world, tensor=tensor, replica_size=replica_size)


def test_a_failure_of_any_process_is_raised_here(generators, monkeypatch):
    generator = generators(0, 1, tensor=1, replica_size=1)

    def gather(parts, x, group=None) -> None:
        parts[:] = [x]

    monkeypatch.setattr(dist, "all_gather_object", gather)

    def run(jobs, carried):
        raise OSError("no device")

    with pytest.raises(RolloutError, match="^OSError: no device$"):
        generator.play(JOBS, run)
