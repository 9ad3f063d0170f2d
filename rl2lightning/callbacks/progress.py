"""The progress bar: one line, short names, steps instead of epochs."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import TQDMProgressBar


class StepProgressBar(TQDMProgressBar):
    """Lightning's bar with what matters in post-training: reward or loss, tokens per second, seconds per step."""

    def get_metrics(self, trainer: L.Trainer, pl_module: Any) -> dict[str, int | str | float | dict[str, float]]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)
        return {_short(name): _round(x) for name, x in metrics.items()}


def _short(name: str) -> str:
    shorter = {"perf/step_seconds": "s/step", "perf/tokens_per_second": "tok/s"}
    return shorter.get(name) or (name.rsplit("/", 1)[-1] if name.startswith(("train/", "rollout/")) else name)


def _round(x: Any) -> Any:
    return f"{x:,.0f}" if isinstance(x, float) and abs(x) >= 1000 else f"{x:.3g}" if isinstance(x, float) else x
