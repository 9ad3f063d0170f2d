from types import SimpleNamespace

from rl2lightning.callbacks.progress import StepProgressBar


def test_the_bar_shows_short_names_and_numbers() -> None:
    metrics = {
        "v_num": 3,
        "train/loss": 0.123456,
        "rollout/reward": 0.5,
        "val/accuracy": 0.25,
        "perf/step_seconds": 12.3456,
        "perf/tokens_per_second": 12345.6,
    }
    trainer = SimpleNamespace(progress_bar_metrics=metrics, loggers=[])
    assert StepProgressBar().get_metrics(trainer, None) == {  # type: ignore[arg-type]
        "loss": "0.123",
        "reward": "0.5",
        "val/accuracy": "0.25",  # validation keeps its name: it stands beside the rollouts'
        "s/step": "12.3",
        "tok/s": "12,346",
    }
