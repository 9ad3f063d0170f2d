"""Trajectories that are cut off and gone on with: nothing about them changes but the weights that go on."""

from __future__ import annotations

import io
import threading
import time
from copy import deepcopy
from datetime import date

import pytest
import torch

from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.rewards.base import FunctionReward, RewardTransform
from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutLoop, RolloutResult
from rl2lightning.rollout.partial import Carried, PartialRollouts
from rl2lightning.types import SamplingParams, Trajectory

END = 2
# many tokens end a turn, so that turns are of many lengths
SAMPLING = SamplingParams(max_tokens=9, temperature=0.8, stop_token_ids=tuple(range(60, 80)))
NEVER_TOO_OLD = 99


class Counting(Environment):
    """Says how many assistant turns it has seen, and rewards each."""

    def step(self, messages, row):
        seen = sum(m["role"] == "assistant" for m in messages)
        return StepResult([{"role": "tool", "content": f"seen {seen}"}], reward=0.25)


def length(messages) -> float:
    return float(len(messages[-1]["content"]))


def jobs(num_groups: int = 4, num_samples: int = 3) -> list[Job]:
    rows = [{"messages": [{"role": "user", "content": "hello"[: 1 + i]}], "number": i} for i in range(num_groups)]
    return [Job(rows[i], group_id=i, sample_id=k) for i in range(num_groups) for k in range(num_samples)]


@pytest.fixture
def engine(model, model_path) -> HFEngine:
    engine = HFEngine(max_num_seqs=5)
    engine.start(EngineSpec(str(model_path), "cpu", torch.float32, stop_token_ids=(END,)))
    engine.update_weights(model.named_parameters(), version=0)
    return engine


@pytest.fixture
def loop(engine, tokenizer) -> RolloutLoop:
    return RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=3, rewards=[FunctionReward(length)])


def in_rounds(loop: RolloutLoop, partial: PartialRollouts, new: list[Job]) -> list[RolloutResult]:
    """Rollouts until nothing is left."""
    results = [loop.run(new, SAMPLING, 7, partial=partial)]
    while results[-1].carried:
        results.append(loop.run([], SAMPLING, 7, partial=partial, carried=results[-1].carried))
    return results


def by_key(trajectories: list[Trajectory]) -> dict[tuple[int, int], Trajectory]:
    return {(t.group_id, t.sample_id): t for t in trajectories}


@pytest.mark.parametrize(
    "partial",
    [
        PartialRollouts(tokens=2, max_age=NEVER_TOO_OLD),
        PartialRollouts(tokens=11, max_age=NEVER_TOO_OLD),  # cuts between turns and within
        PartialRollouts(share=0.3, max_age=NEVER_TOO_OLD),
    ],
    ids=str,
)
def test_under_the_same_weights_pieces_make_the_trajectory_that_one_rollout_makes(loop, partial):
    whole = by_key(loop.run(jobs(), SAMPLING, 7).trajectories)
    rounds = in_rounds(loop, partial, jobs())
    assert len(rounds) > 1
    pieces = by_key([t for result in rounds for t in result.trajectories])
    assert pieces.keys() == whole.keys()
    assert sum(result.num_tokens for result in rounds) == sum(t.num_actions for t in whole.values())
    for key, t in whole.items():
        piece = pieces[key]
        assert piece.token_ids == t.token_ids
        assert (piece.action_mask, piece.messages, piece.scores) == (t.action_mask, t.messages, t.scores)
        assert (piece.rewards, piece.reward, piece.truncated) == (t.rewards, t.reward, t.truncated)
        assert piece.logps == pytest.approx(t.logps, abs=1e-5)
        assert piece.weight_versions == t.weight_versions == [0] * len(t.token_ids)


def test_a_group_is_handed_over_once_and_whole(loop):
    groups = []

    class Watched(RewardTransform):
        def __call__(self, scores, group_ids, weights):
            groups.append(sorted(group_ids.tolist()))
            return scores["length"]

    loop.transform = Watched()
    rounds = in_rounds(loop, PartialRollouts(tokens=8, max_age=NEVER_TOO_OLD), jobs())
    assert sorted(i for group_ids in groups for i in set(group_ids)) == [0, 1, 2, 3]
    assert all(group_ids.count(i) == 3 for group_ids in groups for i in group_ids)
    waiting = [c for result in rounds for c in result.carried if c.ended]
    assert waiting  # some had ended before others of their group


def test_every_token_has_the_logp_and_the_version_of_the_weights_that_drew_it(engine, loop, model):
    other = deepcopy(model)
    for p in other.parameters():
        p.mul_(0.8)
    partial = PartialRollouts(tokens=4, max_age=NEVER_TOO_OLD)
    first = loop.run(jobs(), SAMPLING, 7, partial=partial)
    engine.update_weights(other.named_parameters(), version=3)
    second = loop.run([], SAMPLING, 7, carried=first.carried)
    assert len(first.trajectories) + len(second.trajectories) == 12
    assert {
        tuple(sorted({v for v, a in zip(t.weight_versions, t.action_mask, strict=True) if a}))
        for t in second.trajectories
    } >= {(0, 3)}
    for t in (*first.trajectories, *second.trajectories):
        ids, mask = torch.tensor([t.token_ids]), torch.tensor(t.action_mask)[1:]
        with torch.no_grad():
            both = [(m(input_ids=ids).logits[0, :-1] / 0.8).log_softmax(-1) for m in (model, other)]
        old, new = (logps.gather(-1, ids[0, 1:, None])[:, 0] for logps in both)
        expected = torch.where(torch.tensor(t.weight_versions)[1:] == 3, new, old)
        torch.testing.assert_close(torch.tensor(t.logps)[1:][mask], expected[mask], atol=1e-5, rtol=0)
        assert t.weight_version == 0


def test_what_is_too_old_is_played_to_its_end(engine, loop, model):
    partial = PartialRollouts(tokens=1, max_age=2)
    result = loop.run(jobs(), SAMPLING, 7, partial=partial)
    assert len(result.carried) == 12
    engine.update_weights(model.named_parameters(), version=1)
    result = loop.run([], SAMPLING, 7, partial=partial, carried=result.carried)
    assert len(result.carried) == 12  # of age 1
    engine.update_weights(model.named_parameters(), version=2)
    late = Job({"messages": [{"role": "user", "content": "new"}]}, group_id=9)
    result = loop.run([late], SAMPLING, 7, partial=partial, carried=result.carried)
    assert len(result.trajectories) == 12
    assert [c.key for c in result.carried] == [(9, 0)]


def test_a_rollout_ends_with_its_share_and_requests_that_are_too_old_go_on(engine, tokenizer, model):
    loop = RolloutLoop(engine, tokenizer)
    new = [Job({"messages": [{"role": "user", "content": "hi"}]}, group_id=i) for i in range(20)]
    sampling = SamplingParams(max_tokens=40, stop_token_ids=tuple(range(60, 68)))
    partial = PartialRollouts(share=0.5, max_age=1)
    first = loop.run(new, sampling, 7, partial=partial)
    whole = loop.run(new, sampling, 7)
    assert 10 <= len(first.trajectories) < 20  # several may end in one step
    assert len(first.trajectories) + len(first.carried) == 20
    assert first.num_tokens < whole.num_tokens
    engine.update_weights(model.named_parameters(), version=1)
    second = loop.run([], sampling, 7, partial=partial, carried=first.carried)
    assert not second.carried


def test_calls_that_have_begun_when_a_rollout_ends_are_waited_for_and_count_once(engine, tokenizer):
    calls: list[int] = []

    class Slow(Environment):
        def step(self, messages, row):
            calls.append(row["number"])
            time.sleep(0.3 if row["number"] else 0.0)
            return StepResult([{"role": "tool", "content": "ok"}], reward=0.5)

    loop = RolloutLoop(engine, tokenizer, environment=Slow(), max_turns=2)
    sampling = SamplingParams(max_tokens=2, stop_token_ids=tuple(range(3, 98)))  # a turn is a token
    rows = [{"messages": [{"role": "user", "content": "hi"}], "number": i} for i in range(3)]
    partial = PartialRollouts(share=0.3)
    first = loop.run([Job(row, group_id=i) for i, row in enumerate(rows)], sampling, 7, partial=partial)
    assert [t.group_id for t in first.trajectories] == [0]
    assert [(c.key, c.trajectory.rewards[-1], bool(c.reply)) for c in first.carried] == [
        ((i, 0), 0.5, True) for i in (1, 2)
    ]
    assert not any(thread.name.startswith("rollout") for thread in threading.enumerate())
    second = loop.run([], sampling, 7, carried=first.carried)
    assert [(t.group_id, t.num_turns, t.reward) for t in second.trajectories] == [(1, 2, 0.5), (2, 2, 0.5)]
    assert sorted(calls) == [0, 1, 2]


def test_what_is_carried_stays_as_it_is_and_survives_a_file_of_plain_types(loop):
    partial = PartialRollouts(tokens=11, max_age=NEVER_TOO_OLD)
    carried = loop.run(jobs(), SAMPLING, 7, partial=partial).carried
    states = [deepcopy(c.state_dict()) for c in carried]
    expected = loop.run([], SAMPLING, 7, carried=carried).trajectories
    assert [c.state_dict() for c in carried] == states
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    restored = [Carried.of(state) for state in torch.load(file, weights_only=True)]
    assert loop.run([], SAMPLING, 7, carried=restored).trajectories == expected


def test_a_row_that_no_checkpoint_could_hold_is_refused_by_the_name_of_its_column(loop):
    job = Job({"messages": [{"role": "user", "content": "hi"}], "day": [date(2026, 1, 1)]}, group_id=0)
    with pytest.raises(ValueError, match="column 'day' of a prompt holds a list"):
        loop.run([job], SAMPLING, 7, partial=PartialRollouts(tokens=1))
    assert len(loop.run([job], SAMPLING, 7).trajectories) == 1


def test_a_message_that_no_checkpoint_could_hold_is_refused(engine, tokenizer):
    class Dated(Environment):
        def step(self, messages, row):
            return StepResult([{"role": "tool", "content": "ok", "day": date(2026, 1, 1)}])

    loop = RolloutLoop(engine, tokenizer, environment=Dated(), max_turns=3)
    with pytest.raises(ValueError, match="'day' of a message of the environment is a date"):
        loop.run(jobs(), SAMPLING, 7, partial=PartialRollouts(tokens=11))
    assert len(loop.run(jobs(), SAMPLING, 7).trajectories) == 12


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "set partial.share or partial.tokens"),
        ({"share": 1.0}, "share=1.0"),
        ({"share": 0.0}, "share=0.0"),
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 1, "max_age": 0}, "max_age=0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        PartialRollouts(**settings)
