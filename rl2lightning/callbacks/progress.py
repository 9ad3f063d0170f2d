"""The progress bar: one line, short names, steps instead of epochs."""

from __future__ import annotations

import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import RunningStage


class StepProgressBar(TQDMProgressBar):
    """Lightning's bar with what matters in post-training: reward or loss, tokens per second, seconds per step.

    While completions are generated, how many trajectories have finished stands before it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._began: float | None = None  # when generating began
        self._shown = 0.0
        self._description: str | None = None  # of the bar, while another stands there

    def generation(self, finished: int, total: int, num_tokens: int) -> None:
        """Shows how far a rollout is, at most five times a second."""
        now = time.monotonic()
        if self._began is None:
            self._began = now
        bar = self._current_bar()
        if bar is None or bar.disable or now - self._shown < 0.2:
            return
        if self._description is None:
            self._description = bar.desc or ""
        self._shown = now
        speed = num_tokens / max(now - self._began, 1e-9)
        bar.set_description_str(f"generating {finished:,}/{total:,}, {speed:,.0f} tok/s")

    def generation_ended(self) -> None:
        """Puts back what stood there before."""
        bar = self._current_bar()
        if bar is not None and self._description is not None:
            bar.set_description_str(self._description)
        self._began, self._shown, self._description = None, 0.0, None

    def _current_bar(self) -> Any:
        bars: dict[RunningStage | None, Any] = {
            RunningStage.TRAINING: self._train_progress_bar,
            RunningStage.SANITY_CHECKING: self._val_progress_bar,
            RunningStage.VALIDATING: self._val_progress_bar,
            RunningStage.TESTING: self._test_progress_bar,
            RunningStage.PREDICTING: self._predict_progress_bar,
        }
        return bars.get(self.trainer.state.stage)

    def get_metrics(self, trainer: L.Trainer, pl_module: Any) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {_short(name): _round(x) for name, x in metrics.items()}


def _short(name: str) -> str:
    shorter = {"perf/step_seconds": "s/step", "perf/tokens_per_second": "tok/s"}
    return shorter.get(name) or (name.rsplit("/", 1)[-1] if name.startswith(("train/", "rollout/")) else name)


def _round(x: Any) -> Any:
    return f"{x:,.0f}" if isinstance(x, float) and abs(x) >= 1000 else f"{x:.3g}" if isinstance(x, float) else x
