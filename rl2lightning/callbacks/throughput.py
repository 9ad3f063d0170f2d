"""Tokens per second and seconds per step, on the progress bar and in the logs."""

from __future__ import annotations

import time
from typing import Any

import lightning as L


class Throughput(L.Callback):
    """Logs `perf/step_seconds` (rollout included) and `perf/tokens_per_second` (tokens trained on, over all processes).

    Args:
        smoothing: weight of the past in the running average that is logged; 0: each step for itself.
    """

    def __init__(self, smoothing: float = 0.8) -> None:
        if not 0 <= smoothing < 1:
            raise ValueError(f"throughput.smoothing={smoothing} must lie in [0, 1)")
        self.smoothing = smoothing
        self._started: float | None = None
        self._seconds = self._tokens = 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._started = time.perf_counter()

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._started = time.perf_counter()  # validation is no part of a step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        now = time.perf_counter()
        assert self._started is not None
        keep = self.smoothing if self._seconds else 0.0
        self._seconds = keep * self._seconds + (1 - keep) * (now - self._started)
        self._tokens = keep * self._tokens + (1 - keep) * pl_module.num_tokens_in_step
        self._started = now
        pl_module.log("perf/step_seconds", self._seconds, prog_bar=True, batch_size=1)
        pl_module.log("perf/tokens_per_second", self._tokens / self._seconds, prog_bar=True, batch_size=1)
