"""When the engine generates, with which weights, and what becomes of the trajectories."""

import json
import logging
import math
import threading
from pathlib import Path

import lightning as L
import pytest

from rl2lightning import GRPO, SFT, ChatDataModule, HFEngine, PromptDataModule, RolloutCallback
from rl2lightning.callbacks.preemption import Preemption
from rl2lightning.environments import ToolEnvironment
from rl2lightning.rewards import ExactMatch, FunctionReward, LengthPenalty
from rl2lightning.rewards.remote import RemoteReward
from rl2lightning.types import RolloutError, SamplingParams, Trajectory


def digits(messages) -> float:
    return float(sum(c.isdigit() for c in messages[-1]["content"]))


def flat() -> float:
    return 0.5


def broken(messages) -> float:
    raise RuntimeError("no grader")


class Batches(L.Callback):
    """The trajectories of every training step, and what was logged."""

    def __init__(self) -> None:
        self.trajectories: list[list[Trajectory]] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.trajectories.append(batch.trajectories)
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items()})


# ---- the engine's life and its weights


@pytest.mark.parametrize(
    ("push", "expected"),
    [
        (
            "every_step",
            ["push 0", "wake", "sleep", "push 1", "push 2", "wake", "sleep", "push 3", "push 4"],
        ),
        ("before_generation", ["push 0", "wake", "sleep", "push 2", "wake", "sleep"]),
    ],
)
def test_weights_are_pushed_when_asked_for_and_before_every_generation(
    engine, make_trainer, grpo, prompts, push: str, expected: list[str]
) -> None:
    batches = Batches()
    rollouts = RolloutCallback(engine, rewards=[digits], push=push)
    make_trainer(rollouts, batches, max_steps=4).fit(grpo(updates_per_rollout=2), datamodule=prompts())
    assert engine.events == ["start", "sleep", *expected, "shutdown"]
    versions = [{t.weight_version for t in trajectories} for trajectories in batches.trajectories]
    assert versions == [{0}, set(), {2}, set()]


def test_every_prompt_is_sampled_as_often_as_the_module_says(engine, make_trainer, grpo, prompts) -> None:
    batches = Batches()
    make_trainer(RolloutCallback(engine, rewards=[digits]), batches, max_steps=2).fit(grpo(), datamodule=prompts())
    for step, trajectories in enumerate(batches.trajectories):
        drawn = [(t.group_id, t.sample_id) for t in trajectories]
        assert drawn == [(4 * step + i, k) for i in range(4) for k in range(4)]


def test_a_second_fit_starts_the_engine_again(engine, make_trainer, grpo, prompts) -> None:
    rollouts = RolloutCallback(engine, rewards=[digits], push="before_generation")
    for _ in range(2):
        make_trainer(rollouts).fit(grpo(), datamodule=prompts())
    assert engine.events == ["start", "sleep", "push 0", "wake", "sleep", "shutdown"] * 2


@pytest.mark.parametrize("error", [ValueError("of ours"), KeyboardInterrupt()])
def test_the_engine_is_shut_down_when_training_fails(engine, make_trainer, grpo, prompts, error) -> None:
    class Fail(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            raise error

    with pytest.raises((ValueError, SystemExit)):  # Lightning turns Ctrl-C into an exit
        make_trainer(RolloutCallback(engine, rewards=[digits]), Fail()).fit(grpo(), datamodule=prompts())
    assert engine.events[-1] == "shutdown"
    assert engine.events.count("shutdown") == 1
    assert engine._model is None


def test_the_engine_makes_room_and_is_shut_down_when_generating_fails(engine, make_trainer, grpo, prompts) -> None:
    with pytest.raises(
        RolloutError, match=r"^reward 'broken' raised RuntimeError: no grader .*on_reward_error to zero"
    ):
        make_trainer(RolloutCallback(engine, rewards=[broken])).fit(grpo(), datamodule=prompts())
    assert engine.events[-3:] == ["wake", "sleep", "shutdown"]


def test_a_fit_whose_engine_does_not_start_saves_nothing_of_the_fit_before(
    engine, make_trainer, grpo, prompts, tmp_path, monkeypatch
) -> None:
    def no_room(spec) -> None:
        raise MemoryError("no room")

    trainer = make_trainer(RolloutCallback(engine, rewards=[digits]), Preemption())
    trainer.fit(grpo(), datamodule=prompts())
    monkeypatch.setattr(engine, "start", no_room)
    trainer.fit_loop.epoch_loop.max_steps = 2
    with pytest.raises(RolloutError, match="^MemoryError: no room$") as error:
        trainer.fit(grpo(), datamodule=prompts())
    assert isinstance(error.value.__cause__, MemoryError)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_a_setting_that_the_engine_refuses_is_a_value_error(engine, make_trainer, grpo, prompts, monkeypatch) -> None:
    def refuse(spec) -> None:
        raise ValueError("engine.init_args.max_num_seqs=0 must be at least 1")

    monkeypatch.setattr(engine, "start", refuse)
    with pytest.raises(ValueError, match="^engine.init_args.max_num_seqs=0 must"):
        make_trainer(RolloutCallback(engine, rewards=[digits])).fit(grpo(), datamodule=prompts())


def test_a_failing_engine_leaves_a_checkpoint_that_goes_on_with_the_same_rollout(
    engine, make_trainer, grpo, prompts, tmp_path
) -> None:
    def versions_and_prompts(*callbacks, **settings):
        batches = Batches()
        trainer = make_trainer(*callbacks, batches, Preemption(), max_steps=4)
        trainer.fit(grpo(updates_per_rollout=2, **settings), datamodule=prompts(), ckpt_path=checkpoint)
        return [[(t.group_id, t.token_ids) for t in batch] for batch in batches.trajectories]

    checkpoint = None
    whole = versions_and_prompts(RolloutCallback(rewards=[digits], engine=HFEngine()))
    engine.fails_at = 2
    with pytest.raises(RolloutError, match="OSError: the device fell off"):
        versions_and_prompts(RolloutCallback(rewards=[digits], engine=engine))
    (checkpoint,) = tmp_path.rglob("interrupted.ckpt")
    resumed = versions_and_prompts(RolloutCallback(rewards=[digits], engine=HFEngine()))
    assert [len(batch) for batch in whole] == [16, 0, 16, 0]
    assert resumed == whole[2:]


@pytest.mark.parametrize("check_logps", ["first", "always", "never"])
def test_an_engine_that_computes_another_model_ends_the_run(make_trainer, grpo, prompts, check_logps) -> None:
    class Stale(HFEngine):
        """Misses a weight of every push but the first."""

        def update_weights(self, weights, version: int) -> None:
            if version and check_logps == "always" or not version and check_logps == "first":
                weights = [(name, w if "layers.1" in name else w * 0.5) for name, w in weights]
            super().update_weights(weights, version)

    trainer = make_trainer(RolloutCallback(Stale(), rewards=[digits], check_logps=check_logps), max_steps=3)
    if check_logps == "never":
        trainer.fit(grpo(), datamodule=prompts())
        return
    with pytest.raises(RolloutError, match=r"log-probs differ from the trainer's by .* 0\.001 is what float32"):
        trainer.fit(grpo(), datamodule=prompts())
    assert trainer.global_step == (0 if check_logps == "first" else 1)


# ---- rewards


def test_rewards_that_fail_may_count_zero(make_trainer, grpo, prompts) -> None:
    batches = Batches()
    rollouts = RolloutCallback(rewards=[digits, broken], on_reward_error="zero")
    make_trainer(rollouts, batches).fit(grpo(), datamodule=prompts())
    (metrics,), (trajectories,) = batches.metrics, batches.trajectories
    assert metrics["rollout/reward_errors"] == 16
    assert metrics["rollout/dropped"] == 0
    assert metrics["rollout/score/broken"] == 0
    assert [t.reward for t in trajectories] == [digits(t.messages) for t in trajectories]


def test_samples_whose_reward_fails_may_be_dropped(make_trainer, grpo, prompts, caplog) -> None:
    def fails_for_the_first(trajectory) -> float:
        if trajectory.sample_id == 0:
            raise RuntimeError("not this one")
        return float(trajectory.sample_id)

    batches = Batches()
    rollouts = RolloutCallback(rewards=[fails_for_the_first], on_reward_error="drop")
    with caplog.at_level("INFO"):
        make_trainer(rollouts, batches, max_steps=2).fit(grpo(), datamodule=prompts())
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if line.startswith("4 samples of this rollout dropped, as a reward")]) == 1
    failures = [line for line in said if "raised RuntimeError: not this one" in line]
    assert len(failures) == 2  # one a rollout
    assert all(line.endswith("; counted, and dropped") for line in failures)
    (metrics, _), (trajectories, _) = batches.metrics, batches.trajectories
    assert metrics["rollout/dropped"] == metrics["rollout/reward_errors"] == 4
    assert [t.sample_id for t in trajectories] == [1, 2, 3] * 4
    assert metrics["rollout/reward"] == 2


def test_metrics_are_means_over_the_trajectories(make_trainer, grpo, prompts) -> None:
    batches = Batches()
    rewards = [FunctionReward(digits, weight=2.0), LengthPenalty(scale=10.0)]
    make_trainer(RolloutCallback(rewards=rewards, success_threshold=2.0), batches).fit(grpo(), datamodule=prompts())
    (metrics,), (trajectories,) = batches.metrics, batches.trajectories
    found = [digits(t.messages) for t in trajectories]
    lengths = [t.num_actions for t in trajectories]
    totals = [2 * d - n / 10 for d, n in zip(found, lengths, strict=True)]
    mean = sum(totals) / 16
    assert metrics["rollout/score/digits"] == pytest.approx(sum(found) / 16)
    assert metrics["rollout/score/length"] == pytest.approx(-sum(lengths) / 160)
    assert metrics["rollout/response_length"] == pytest.approx(sum(lengths) / 16)
    assert metrics["rollout/reward"] == pytest.approx(mean)
    assert metrics["rollout/reward_std"] == pytest.approx(
        math.sqrt(sum((x - mean) ** 2 for x in totals) / 16), rel=1e-5
    )
    assert metrics["rollout/accuracy"] == sum(d >= 2 for d in found) / 16  # by the first reward alone
    assert metrics["rollout/truncated"] == sum(t.truncated for t in trajectories) / 16
    assert metrics["rollout/turns"] == 1


# ---- dynamic sampling


class EvenGroups(RolloutCallback):
    def keep(self, group: list[Trajectory]) -> bool:
        return group[0].group_id % 2 == 0


def test_groups_that_are_not_kept_are_replaced_by_the_next_prompts(make_trainer, grpo, prompts) -> None:
    batches, data = Batches(), prompts()
    make_trainer(EvenGroups(rewards=[digits], dynamic_sampling=True), batches, max_steps=2).fit(grpo(), datamodule=data)
    groups = [sorted({t.group_id for t in trajectories}) for trajectories in batches.trajectories]
    # 0 1 2 3 leaves two to find, 4 5 one more, 6 the last; the next rollout goes on behind them
    assert groups == [[0, 2, 4, 6], [8, 10, 12, 14]]
    assert [metrics["rollout/filtered_groups"] for metrics in batches.metrics] == [3, 4]
    assert all(len(trajectories) == 16 for trajectories in batches.trajectories)
    assert data.position.prompt == 15


def test_without_dynamic_sampling_nothing_is_filtered(make_trainer, grpo, prompts) -> None:
    batches = Batches()
    make_trainer(EvenGroups(rewards=[digits]), batches).fit(grpo(), datamodule=prompts())
    assert {t.group_id for t in batches.trajectories[0]} == {0, 1, 2, 3}
    assert "rollout/filtered_groups" not in batches.metrics[0]


def test_groups_with_equal_rewards_are_those_not_kept() -> None:
    def group(*rewards: float) -> list[Trajectory]:
        return [Trajectory(row={}, group_id=0, reward=r) for r in rewards]

    callback = RolloutCallback()
    assert not callback.keep(group(0.5, 0.5, 0.5))
    assert not callback.keep(group(1.0))
    assert callback.keep(group(0.5, 0.5, 0.25))


def test_too_few_groups_after_all_refills_are_warned_of_and_used(make_trainer, grpo, prompts) -> None:
    class First(RolloutCallback):
        def keep(self, group: list[Trajectory]) -> bool:
            return group[0].group_id == 0

    batches, data = Batches(), prompts()
    with pytest.warns(UserWarning, match="dynamic sampling found 1 of 4 groups in 2 refills"):
        make_trainer(First(rewards=[digits], dynamic_sampling=True, max_refills=2), batches).fit(
            grpo(), datamodule=data
        )
    assert {t.group_id for t in batches.trajectories[0]} == {0}
    assert data.position.prompt == 4 + 3 + 3


def test_a_run_in_which_all_rewards_are_equal_ends_and_says_so(
    make_trainer, grpo, prompts, caplog: pytest.LogCaptureFixture
) -> None:
    batches, data = Batches(), prompts()
    trainer = make_trainer(RolloutCallback(rewards=[flat], dynamic_sampling=True, max_refills=3), batches, max_steps=50)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer.fit(grpo(), datamodule=data)
    assert "every group of 4 prompts and 3 refills had equal rewards" in caplog.text
    assert trainer.global_step == 1  # the step that found nothing counts and is the last
    assert data.position.prompt == 4 * 4  # and the search was bounded
    assert batches.trajectories == [[]]


# ---- what a subclass may change


def test_a_subclass_decides_how_prompts_become_trajectories(make_trainer, grpo, prompts) -> None:
    class Longest(RolloutCallback):
        """Keeps the two longest samples of each prompt."""

        def collect(self, trainer, pl_module, rows, indices, metrics) -> list[Trajectory]:
            found = super().collect(trainer, pl_module, rows, indices, metrics)
            groups = [[t for t in found if t.group_id == i] for i in indices]
            return [t for g in groups for t in sorted(g, key=lambda t: t.num_actions)[-2:]]

    batches = Batches()
    make_trainer(Longest(rewards=[digits]), batches).fit(grpo(), datamodule=prompts())
    assert len(batches.trajectories[0]) == 8


def test_a_subclass_decides_when_to_push(engine, make_trainer, grpo, prompts) -> None:
    class Never(RolloutCallback):
        def push(self, trainer, pl_module) -> None:
            if self.engine.version is None:
                super().push(trainer, pl_module)

    make_trainer(Never(engine, rewards=[digits]), max_steps=3).fit(grpo(), datamodule=prompts())
    assert [e for e in engine.events if e.startswith("push")] == ["push 0"]


# ---- validation, test, prediction


def test_validation_is_greedy_and_scores_every_held_out_row(engine, make_trainer, grpo, prompts) -> None:
    seen: list[Trajectory] = []

    class Look(L.Callback):
        def on_validation_batch_end(self, trainer, pl_module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
            seen.extend(batch.trajectories)

    module, data = grpo(), prompts(val_ratio=0.2, val_batch_size=5)
    trainer = make_trainer(RolloutCallback(engine, rewards=[digits]), Look())
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    again = list(seen)
    seen.clear()
    trainer.validate(module, datamodule=data, verbose=False)
    assert len(seen) == len(again) == len(data.val_split) == 13
    assert [t.token_ids for t in seen] == [t.token_ids for t in again]
    assert metrics["val/reward"] == pytest.approx(sum(digits(t.messages) for t in again) / 13)
    assert metrics["val/accuracy"] == pytest.approx(sum(digits(t.messages) >= 1 for t in again) / 13)
    assert [e for e in engine.events if e.startswith("push")] == ["push 0"] * 2


def test_validation_within_a_fit_uses_the_weights_of_its_step(engine, make_trainer, grpo, prompts) -> None:
    rollouts = RolloutCallback(engine, rewards=[digits], push="before_generation")
    trainer = make_trainer(rollouts, max_steps=2, val_check_interval=2, check_val_every_n_epoch=None)
    trainer.fit(grpo(updates_per_rollout=2), datamodule=prompts(val_ratio=0.1))
    assert [e for e in engine.events if e.startswith("push")] == ["push 0", "push 2"]  # sanity check, after training


def test_supervised_training_can_sample_its_held_out_prompts(make_trainer, tiny_model: str, task: str) -> None:
    data = ChatDataModule(f"conversations@{task}", batch_size=16, max_length=32, val_ratio=0.2)
    module = SFT(tiny_model, eval_sampling=SamplingParams(max_tokens=4, temperature=0.0))
    trainer = make_trainer(RolloutCallback(rewards=[ExactMatch()]))
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/accuracy"] == metrics["val/score/exact_match"] == metrics["val/reward"]
    assert metrics["val/loss"] > 0


def test_tools_without_a_turn_to_answer_in_are_warned_of(make_trainer, grpo, prompts) -> None:
    def double(x: int) -> int:
        """Doubles.

        Args:
            x: a number
        """
        return 2 * x

    tools = ToolEnvironment([double], describe="none")
    rollouts = RolloutCallback(environment=tools, rewards=[digits])
    with pytest.warns(
        UserWarning, match="ToolEnvironment is asked for no answer with max_turns=1: set max_turns of Roll"
    ):
        make_trainer(rollouts).fit(grpo(), datamodule=prompts())


def test_predictions_are_one_line_per_held_out_row(make_trainer, grpo, prompts, tmp_path: Path) -> None:
    data = prompts(val_ratio=0.2, val_batch_size=5)
    returned = make_trainer(RolloutCallback(rewards=[digits])).predict(grpo(), datamodule=data)
    records = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    rows = [data.val_split.rows[i] for i in data.val_split.indices]
    assert [r["messages"][0] for r in records] == [row["messages"][0] for row in rows]
    assert [r["answer"] for r in records] == [row["answer"] for row in rows]
    for r in records:
        assert [m["role"] for m in r["messages"]] == ["user", "assistant"]
        assert r["reward"] == r["scores"]["digits"] == digits(r["messages"])
    assert [t.messages for batch in returned for t in batch] == [r["messages"] for r in records]


def test_predictions_do_not_count_in_a_later_validation(make_trainer, grpo, prompts) -> None:
    reward = 1.0

    def constant() -> float:
        return reward

    module, data = grpo(), prompts(val_ratio=0.2)
    trainer = make_trainer(RolloutCallback(rewards=[constant]))
    trainer.predict(module, datamodule=data)
    reward = 0.0
    (metrics,) = trainer.validate(module, datamodule=data, verbose=False)
    assert metrics["val/reward"] == 0.0


def test_prompts_that_nobody_plays_are_an_error(make_trainer, grpo, prompts) -> None:
    with pytest.raises(ValueError, match=r"add rl2lightning\.RolloutCallback to trainer\.callbacks"):
        make_trainer().fit(grpo(), datamodule=prompts())
    with pytest.raises(ValueError, match=r"add rl2lightning\.RolloutCallback to trainer\.callbacks"):
        make_trainer().predict(grpo(), datamodule=prompts(val_ratio=0.2))


def test_a_rollout_whose_samples_are_all_dropped_is_a_step_that_changes_nothing(make_trainer, grpo, prompts) -> None:
    calls = iter(range(100))

    def fails_at_first(messages) -> float:
        return digits(messages) if next(calls) >= 16 else broken(messages)

    trainer = make_trainer(RolloutCallback(rewards=[fails_at_first], on_reward_error="drop"), max_steps=2)
    with pytest.warns(UserWarning, match="of all samples of this rollout, 16 were dropped.*: nothing was learned"):
        trainer.fit(grpo(), datamodule=prompts())
    assert trainer.global_step == 2
    assert trainer.callback_metrics["rollout/dropped"] == 0


def test_a_run_whose_rollouts_lose_all_samples_ends_with_an_error(make_trainer, grpo, prompts) -> None:
    trainer = make_trainer(RolloutCallback(rewards=[broken], on_reward_error="drop"), max_steps=2)
    with (
        pytest.warns(UserWarning, match="16 were dropped"),
        pytest.raises(ValueError, match=r"nothing was learned; so it was in every step since training began \(2\)"),
    ):
        trainer.fit(grpo(), datamodule=prompts())
    trainer = make_trainer(RolloutCallback(HFEngine(max_model_len=3), rewards=[digits]))
    with (
        pytest.warns(UserWarning, match="16 were never begun"),
        pytest.raises(ValueError, match=r"no room in the engine's max_model_len: .* \(1\): look at .*max_model_len"),
    ):
        trainer.fit(grpo(), datamodule=prompts())


# ---- what may go wrong


def test_a_rollout_whose_samples_are_all_cut_off_is_counted_and_learned_from(make_trainer, grpo, prompts) -> None:
    batches = Batches()
    sampling = SamplingParams(max_tokens=3, min_tokens=3)  # nothing ends by itself
    trainer = make_trainer(RolloutCallback(rewards=[digits]), batches, max_steps=2)
    trainer.fit(grpo(sampling=sampling), datamodule=prompts())
    assert trainer.global_step == 2
    assert all(t.truncated and t.num_actions == 3 for batch in batches.trajectories for t in batch)
    assert [metrics["rollout/truncated"] for metrics in batches.metrics] == [1.0, 1.0]
    assert all(metrics["train/grad_norm"] > 0 for metrics in batches.metrics)


def test_a_tokenizer_without_end_of_sequence_is_refused_unless_something_else_ends_a_turn(
    make_trainer, make_model, task: str
) -> None:
    from transformers import AutoTokenizer

    model = make_model(eos_token_id=None)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(model)

    def fit(**sampling) -> L.Trainer:
        trainer = make_trainer(RolloutCallback(rewards=[digits]))
        data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, val_ratio=0.0, apply_chat_template=False)
        module = GRPO(model, sampling=SamplingParams(max_tokens=6, **sampling), samples_per_prompt=4)
        trainer.fit(module, datamodule=data)
        return trainer

    with pytest.raises(RolloutError, match=r"nothing ends a turn: .* set sampling\.stop_token_ids or sampling\.stop"):
        fit()
    assert fit(stop=("1",)).global_step == fit(stop_token_ids=(20,)).global_step == 1


def test_a_reward_server_that_is_down_for_a_while_delays_a_rollout_and_changes_nothing(
    make_trainer, grpo, prompts, fake_service
) -> None:
    service = fake_service(lambda payload, headers: (200, {"reward": float(len(payload["messages"][-1]["content"]))}))

    def fit(down: bool) -> Batches:
        if down:
            service.down()
            threading.Timer(0.5, service.up).start()
        batches, reward = Batches(), RemoteReward(service.url, retries=12, backoff=0.05)
        make_trainer(RolloutCallback(rewards=[reward]), batches).fit(grpo(), datamodule=prompts())
        return batches

    always, late = fit(down=False), fit(down=True)
    assert late.trajectories == always.trajectories
    assert late.metrics[0]["rollout/reward_errors"] == 0
