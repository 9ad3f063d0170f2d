from types import SimpleNamespace

import pytest

from rl2lightning import RolloutCallback, Throughput
from rl2lightning.callbacks import throughput


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch):
    """What the callback takes for the time, in seconds."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now.seconds)
    return now


def test_steps_are_averaged_and_validation_is_no_part_of_them(clock) -> None:
    callback = Throughput(smoothing=0.5)
    logged: dict[str, float] = {}
    module = SimpleNamespace(log=lambda name, x, **kwargs: logged.update({name: x}))
    callback.on_train_start(None, None)

    def step(seconds: float, tokens: int) -> tuple[float, float]:
        clock.seconds += seconds
        module.num_tokens_in_step = tokens
        callback.on_train_batch_end(None, module, None, None, 0)
        return logged["perf/step_seconds"], logged["perf/tokens_per_second"]

    assert step(4.0, 400) == (4.0, 100.0)
    assert step(2.0, 800) == (3.0, 200.0)  # (4 + 2) / 2 seconds, (400 + 800) / 2 tokens
    clock.seconds += 1000.0
    callback.on_validation_end(None, None)
    assert step(3.0, 0) == (3.0, 100.0)


def test_without_smoothing_each_step_stands_for_itself(clock) -> None:
    callback = Throughput(smoothing=0.0)
    logged: dict[str, float] = {}
    module = SimpleNamespace(log=lambda name, x, **kwargs: logged.update({name: x}))
    callback.on_train_start(None, None)
    for seconds, tokens in ((5.0, 10), (2.0, 30)):
        clock.seconds += seconds
        module.num_tokens_in_step = tokens
        callback.on_train_batch_end(None, module, None, None, 0)
    assert logged == {"perf/step_seconds": 2.0, "perf/tokens_per_second": 15.0}


@pytest.mark.parametrize("smoothing", [-0.1, 1.0])
def test_a_smoothing_that_never_moves_is_refused(smoothing: float) -> None:
    with pytest.raises(ValueError, match=rf"throughput\.smoothing={smoothing} must lie in \[0, 1\)"):
        Throughput(smoothing)


def test_a_run_logs_the_tokens_that_it_trained_on(make_trainer, grpo, prompts, clock) -> None:
    def varied(trajectory) -> float:
        return float(trajectory.sample_id)

    class Second(Throughput):
        def on_train_batch_end(self, *args) -> None:
            clock.seconds += 2.0
            super().on_train_batch_end(*args)

    seen = []

    class Count(RolloutCallback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            seen.append(batch.rollout.num_tokens)

    trainer = make_trainer(Count(rewards=[varied]), Second(smoothing=0.0), max_steps=2)
    trainer.fit(grpo(), datamodule=prompts())
    assert trainer.callback_metrics["perf/step_seconds"] == 2.0
    assert trainer.callback_metrics["perf/tokens_per_second"] == seen[-1] / 2
