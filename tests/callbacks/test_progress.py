import io
from types import SimpleNamespace

from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.trainer.states import RunningStage

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


def test_generating_shows_how_far_it_is_and_leaves_no_trace(monkeypatch) -> None:
    bar = StepProgressBar()
    bar._trainer = SimpleNamespace(state=SimpleNamespace(stage=RunningStage.TRAINING))  # type: ignore[assignment]
    bar._train_progress_bar = Tqdm(desc="Epoch 0", file=io.StringIO(), disable=False)
    shown = []
    monkeypatch.setattr(bar._train_progress_bar, "set_description_str", shown.append)
    clock = iter([10.0, 10.1, 12.0, 13.0])
    monkeypatch.setattr("rl2lightning.callbacks.progress.time.monotonic", lambda: next(clock))
    bar.generation(0, 1024, 0)
    bar.generation(3, 1024, 500)  # too soon after the last
    bar.generation(700, 1024, 8000)
    bar.generation_ended()
    assert shown == ["generating 0/1,024, 0 tok/s", "generating 700/1,024, 4,000 tok/s", "Epoch 0"]
