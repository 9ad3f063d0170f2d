"""Partial rollouts in training: what is learned from when, what is logged, and what a checkpoint keeps."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import lightning as L
import pytest
import torch

from rl2lightning import HFEngine, RolloutCallback
from rl2lightning.callbacks.preemption import Preemption
from rl2lightning.policy_losses import MismatchCorrection
from rl2lightning.rollout.partial import PartialRollouts
from rl2lightning.types import RolloutError, SamplingParams, Trajectory

# many tokens end a turn, so that some samples are done early
SAMPLING = SamplingParams(max_tokens=8, stop_token_ids=tuple(range(40, 70)))
MISMATCH = MismatchCorrection(cap=1e6)
TOKENS = PartialRollouts(tokens=3, max_age=8)


def digits(messages) -> float:
    return float(sum(c.isdigit() for c in messages[-1]["content"]))


class Log(L.Callback):
    """Trajectories and metrics of every step; saves a checkpoint after the second."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.trajectories: list[list[Trajectory]] = []
        self.metrics: list[dict[str, float]] = []
        self.logps: list[torch.Tensor] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.trajectories.append(batch.trajectories)
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items()})
        if self.path is not None and trainer.global_step == 2:
            trainer.save_checkpoint(self.path)


@pytest.fixture
def fit(make_trainer, grpo, prompts):
    def run(
        *callbacks,
        max_steps: int = 6,
        ckpt_path=None,
        partial=TOKENS,
        trainer=None,
        rollouts=None,
        val_ratio=0.0,
        **settings,
    ):
        log = Log()
        rollouts = rollouts or RolloutCallback(HFEngine(), rewards=[digits], partial=partial)
        module = grpo(**({"sampling": SAMPLING, "mismatch": MISMATCH} | settings))
        trainer = make_trainer(rollouts, *callbacks, log, max_steps=max_steps, **(trainer or {}))
        trainer.fit(module, datamodule=prompts(val_ratio=val_ratio), ckpt_path=ckpt_path)
        return log, rollouts

    return run


def test_groups_are_learned_from_once_whole_and_none_is_lost(fit) -> None:
    log, rollouts = fit()
    learned = Counter((t.group_id, t.sample_id) for batch in log.trajectories for t in batch)
    assert set(learned.values()) == {1}
    carried = {c.key for c in rollouts._carried}
    assert carried
    assert learned.keys() | carried == {(i, k) for i in range(6 * 4) for k in range(4)}
    assert not learned.keys() & carried
    sizes = [Counter(t.group_id for t in batch) for batch in log.trajectories]
    assert all(set(size.values()) == {4} for size in sizes)
    assert len({len(size) for size in sizes}) > 1  # as many groups a step as are whole by then
    for batch in log.trajectories:
        assert [(t.group_id, t.sample_id) for t in batch] == sorted((t.group_id, t.sample_id) for t in batch)


def test_what_is_left_and_how_old_the_tokens_are_is_logged(fit) -> None:
    log, rollouts = fit()
    for step, (batch, metrics) in enumerate(zip(log.trajectories, log.metrics, strict=True)):
        ages = [[step - v for v, a in zip(t.weight_versions, t.action_mask, strict=True) if a] for t in batch]
        assert metrics["rollout/age"] == pytest.approx(sum(sum(a) / len(a) for a in ages) / len(ages))
        assert metrics["rollout/age_max"] == max(max(a) for a in ages)
        assert metrics["rollout/resumed"] == pytest.approx(sum(len(set(a)) > 1 for a in ages) / len(ages))
    assert max(metrics["rollout/age_max"] for metrics in log.metrics) >= 2
    assert log.metrics[-1]["rollout/partial"] == sum(not c.ended for c in rollouts._carried)
    assert log.metrics[-1]["rollout/waiting"] == sum(c.ended for c in rollouts._carried)
    assert log.metrics[-1]["rollout/partial"] > 0


def test_trajectories_in_flight_outlast_several_pushes_and_are_corrected_token_by_token(fit) -> None:
    seen: list[torch.Tensor] = []

    class Watched(MismatchCorrection):
        def __call__(self, old_logps, seqs):
            weights = super().__call__(old_logps, seqs)
            expected = (old_logps.detach() - seqs.rollout_logps).exp() * seqs.action_mask
            torch.testing.assert_close(weights, expected)
            age = seqs.weight_versions.max() - seqs.weight_versions
            seen.append(torch.stack([age.float(), (weights - 1).abs()])[:, seqs.action_mask])
            return weights

    log, _ = fit(updates_per_rollout=2, max_steps=8, mismatch=Watched(cap=1e6))
    versions = [
        {v for t in batch for v, a in zip(t.weight_versions, t.action_mask, strict=True) if a}
        for batch in log.trajectories
    ]
    assert [bool(batch) for batch in log.trajectories] == [True, False] * 4
    assert {2, 4} <= versions[4] | versions[2]  # pushed after every step, resumed two pushes later
    assert all(v % 2 == 0 for batch in versions for v in batch)
    ages, gaps = torch.cat(seen, 1)
    assert gaps[ages >= 2].mean() > 10 * gaps[ages == 0].mean().clamp(min=1e-6) or gaps[ages >= 2].mean() > 1e-3


@pytest.mark.parametrize("partial", [TOKENS, PartialRollouts(share=0.4, max_age=8)], ids=str)
def test_a_resumed_run_goes_on_with_what_was_cut_off_bit_for_bit(fit, tmp_path, partial) -> None:
    checkpoint = tmp_path / "two.ckpt"
    log = Log(checkpoint)
    whole, _ = fit(log, max_steps=5, partial=partial)
    resumed, rollouts = fit(max_steps=5, partial=partial, ckpt_path=checkpoint)
    assert resumed.trajectories == whole.trajectories[2:]
    assert any(
        t.weight_versions and min(v for v, a in zip(t.weight_versions, t.action_mask, strict=True) if a) < 2
        for batch in resumed.trajectories
        for t in batch
    )
    for ours, theirs in zip(resumed.metrics, whole.metrics[2:], strict=True):
        assert {k: v for k, v in ours.items() if "second" not in k} == {
            k: v for k, v in theirs.items() if "second" not in k
        }


def test_an_engine_that_fails_leaves_a_checkpoint_with_what_was_carried_before(fit, engine, tmp_path) -> None:
    whole, _ = fit(max_steps=4)
    engine.fails_at = 3
    with pytest.raises(RolloutError, match="OSError: the device fell off"):
        fit(Preemption(), max_steps=4, rollouts=RolloutCallback(engine, rewards=[digits], partial=TOKENS))
    (checkpoint,) = tmp_path.rglob("interrupted.ckpt")
    resumed, _ = fit(max_steps=4, ckpt_path=checkpoint)
    assert resumed.trajectories == whole.trajectories[2:]


def test_a_rollout_goes_on_until_there_is_a_group_to_learn_from(fit) -> None:
    sampling = SamplingParams(max_tokens=8, min_tokens=0, stop_token_ids=(40,))
    log, _ = fit(max_steps=1, partial=PartialRollouts(tokens=1), sampling=sampling)
    assert log.trajectories[0]
    assert log.metrics[0]["train/grad_norm"] > 0


def test_refills_go_on_with_what_was_cut_off(fit) -> None:
    rollouts = RolloutCallback(HFEngine(), rewards=[digits], partial=TOKENS, dynamic_sampling=True)
    log, _ = fit(rollouts=rollouts, max_steps=3)
    learned = Counter((t.group_id, t.sample_id) for batch in log.trajectories for t in batch)
    assert set(learned.values()) == {1}
    assert all(batch and len(batch) % 4 == 0 for batch in log.trajectories)


def test_refills_replace_what_is_filtered_and_not_what_is_in_flight(fit) -> None:
    filtered: set[int] = set()

    class ThreeOfFour(RolloutCallback):
        def keep(self, group: list[Trajectory]) -> bool:
            filtered.update(t.group_id for t in group if t.group_id % 4 == 3)
            return group[0].group_id % 4 != 3

    rollouts = ThreeOfFour(HFEngine(), rewards=[digits], partial=TOKENS, dynamic_sampling=True)
    log, _ = fit(rollouts=rollouts, max_steps=6)
    learned = {t.group_id for batch in log.trajectories for t in batch}
    in_flight = {c.trajectory.group_id for c in rollouts._carried}
    assert filtered
    assert in_flight
    # four a step, neither more nor fewer, of which some have yet to come to their end
    assert len(learned) + len(in_flight) == 6 * 4
    assert learned | in_flight | filtered == set(range(6 * 4 + len(filtered)))


def test_validation_plays_everything_to_its_end_and_leaves_what_is_carried_alone(fit) -> None:
    seen, carried = [], []

    class Look(L.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
            carried.append([c.state_dict() for c in rollouts._carried])

        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
            seen.extend(batch.trajectories)
            assert [c.state_dict() for c in rollouts._carried] == carried[-1]

    rollouts = RolloutCallback(HFEngine(), rewards=[digits], partial=PartialRollouts(tokens=1))
    settings = {"val_check_interval": 2, "check_val_every_n_epoch": None, "limit_val_batches": 1}
    fit(Look(), rollouts=rollouts, max_steps=4, trainer=settings, val_ratio=0.1)
    assert seen
    assert carried[-1]
    assert max(t.num_actions for t in seen) == 8


def test_tokens_of_earlier_weights_need_a_correction(fit) -> None:
    with pytest.raises(
        ValueError, match=r"partial rollouts hold tokens of earlier weights: set model\.init_args\.mismatch"
    ):
        fit(mismatch=None)


def test_a_second_fit_begins_with_nothing_carried(make_trainer, grpo, prompts) -> None:
    rollouts = RolloutCallback(HFEngine(), rewards=[digits], partial=TOKENS)
    for _ in range(2):
        log = Log()
        make_trainer(rollouts, log).fit(grpo(sampling=SAMPLING, mismatch=MISMATCH), datamodule=prompts())
        assert {t.group_id for t in log.trajectories[0]} <= set(range(4))
        assert all(v == 0 for t in log.trajectories[0] for v in t.weight_versions)
