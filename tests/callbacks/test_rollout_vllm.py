"""Training steps with vLLM generating: the numbers that meet in the loss, and how a run ends when it fails."""

import json
from pathlib import Path

import lightning as L
import pytest

from rl2lightning import GRPO, OptimizerConfig, PromptDataModule, RolloutCallback, VLLMEngine
from rl2lightning.callbacks.preemption import Preemption
from rl2lightning.data.chat import as_messages, encode_prompt, load_tokenizer
from rl2lightning.types import RolloutError, SamplingParams, Trajectory

pytestmark = pytest.mark.vllm
CACHE = {"kv_cache_memory_bytes": 16 << 20}


def digits(messages) -> float:
    return float(sum(c.isdigit() for c in messages[-1]["content"]))


class Log(L.Callback):
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.trajectories: list[list[Trajectory]] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.metrics.append({name: float(x) for name, x in trainer.callback_metrics.items()})
        self.trajectories.append(batch.trajectories)


@pytest.fixture
def grpo(make_model):
    model = make_model(head_dim=32)  # the smallest head that vLLM has a kernel for on the CPU

    def make(**settings) -> GRPO:
        optimizer = OptimizerConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0)
        defaults = {"optimizer": optimizer, "sampling": SamplingParams(max_tokens=6), "samples_per_prompt": 4}
        return GRPO(model, **(defaults | settings))

    return make


def test_where_none_is_named_vllm_is_the_engine_and_samples_with_the_trainers_logps_at_every_step(
    make_trainer, grpo, prompts, caplog
) -> None:
    log, rollouts = Log(), RolloutCallback(rewards=[digits])
    with caplog.at_level("INFO"):
        make_trainer(rollouts, log, max_steps=4).fit(
            grpo(sampling=SamplingParams(max_tokens=6, temperature=0.7)), datamodule=prompts()
        )
    assert isinstance(rollouts.engine, VLLMEngine)
    assert "rollouts by vLLM 0." in caplog.text
    assert [{t.weight_version for t in batch} for batch in log.trajectories] == [{0}, {1}, {2}, {3}]
    assert max(metrics["train/mismatch_max"] for metrics in log.metrics) < 2e-5


def test_prompts_without_room_are_dropped_and_counted_and_the_rest_cut_off(make_trainer, grpo, tmp_path: Path) -> None:
    rows = [{"messages": "3+4="}, {"messages": "333+4="}] * 2
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    module, log = grpo(), Log()
    tokenizer = load_tokenizer(module.tokenizer_path)
    short, long = (len(encode_prompt(tokenizer, as_messages(row["messages"]))) for row in rows[:2])
    assert long == short + 2  # no room is left for an answer to it
    engine = VLLMEngine(max_model_len=short + 2, **CACHE)
    data = PromptDataModule(str(file), prompts_per_rollout=4, val_ratio=0.0, answer_key=None)
    make_trainer(RolloutCallback(engine, rewards=[digits]), log).fit(module, datamodule=data)
    assert log.metrics[0]["rollout/prompts_too_long"] == 2 * 4
    assert [t.messages[0]["content"] for t in log.trajectories[0]] == ["3+4="] * 8
    assert max(t.num_actions for t in log.trajectories[0]) == 2


def test_an_engine_that_fails_mid_rollout_ends_the_run_with_a_checkpoint_and_its_cause(
    make_trainer, grpo, prompts, tmp_path: Path
) -> None:
    engine = VLLMEngine(**CACHE)
    steps = engine._steps

    def fails_in_the_second_rollout():
        if engine.version == 1 and engine.unfinished:
            raise OSError("the device fell off")
        return steps()

    engine._steps = fails_in_the_second_rollout
    trainer = make_trainer(RolloutCallback(engine, rewards=[digits]), Preemption(), max_steps=3)
    with pytest.raises(RolloutError, match="OSError: the device fell off"):
        trainer.fit(grpo(), datamodule=prompts())
    (checkpoint,) = tmp_path.rglob("interrupted.ckpt")
    log = Log()
    trainer = make_trainer(RolloutCallback(VLLMEngine(**CACHE), rewards=[digits]), log, max_steps=2)
    trainer.fit(grpo(), datamodule=prompts(), ckpt_path=checkpoint)
    assert trainer.global_step == 2
    assert {t.group_id for t in log.trajectories[0]} == {4, 5, 6, 7}  # the prompts of the rollout that failed
