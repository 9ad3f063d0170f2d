"""Validation, test and prediction of what is sampled: one completion for each held-out prompt."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from rl2lightning.callbacks.records import trajectory_record, write_records
from rl2lightning.callbacks.rollout_metrics import RolloutMetrics
from rl2lightning.rollout.loop import Job, RolloutResult
from rl2lightning.types import ChatBatch, PromptBatch


class HeldOutSamples(L.Callback, ABC):
    """Logs the means of what is sampled in validation and test, and writes down what is sampled in prediction.

    Args:
        success_threshold: see `RolloutMetrics`.
    """

    def __init__(self, success_threshold: float) -> None:
        self.success_threshold = success_threshold
        self._evaluation = RolloutMetrics(success_threshold)
        self._predictions: list[dict[str, Any]] = []

    @abstractmethod
    def sample_held_out(self, trainer: L.Trainer, pl_module: Any, jobs: list[Job]) -> RolloutResult:
        """Plays this replica's prompts by `eval_sampling`, with the weights of now; on all of its processes."""

    def _evaluate(self, trainer: L.Trainer, pl_module: Any, batch: Any) -> None:
        if not isinstance(batch, (PromptBatch, ChatBatch)):
            return
        rank, size = pl_module.strategy.data_rank, pl_module.strategy.data_size
        indices = batch.indices if isinstance(batch, PromptBatch) else [rank + size * i for i in range(len(batch.rows))]
        jobs = [Job(row, group_id=i, sample_id=0) for row, i in zip(batch.rows, indices, strict=True)]
        result = self.sample_held_out(trainer, pl_module, jobs)
        batch.trajectories = result.trajectories
        if isinstance(batch, PromptBatch):
            batch.rolled_out = True
        if not trainer.predicting:  # nobody asks for the mean of those
            self._evaluation.add(result)

    def _log_means(self, trainer: L.Trainer, pl_module: Any, prefix: str) -> None:
        values = self._evaluation.reduce(pl_module.strategy.gather_objects)
        self._evaluation = RolloutMetrics(self.success_threshold)
        named = {f"{prefix}/{name}": x for name, x in values.items()}
        if trainer.sanity_checking:  # Lightning logs nothing then, but this is the score before training
            for logger in trainer.loggers:
                logger.log_metrics(named, step=trainer.global_step)
            return
        shown = (f"{prefix}/accuracy", f"{prefix}/reward")
        for name, x in named.items():  # global already; Lightning asks for `sync_dist` all the same
            pl_module.log(name, x, prog_bar=name in shown, batch_size=1, sync_dist=True)

    def on_validation_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluate(trainer, pl_module, batch)

    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._log_means(trainer, pl_module, "val")

    def on_test_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluate(trainer, pl_module, batch)

    def on_test_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._log_means(trainer, pl_module, "test")

    def on_predict_batch_start(
        self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._evaluate(trainer, pl_module, batch)
        self._predictions += [trajectory_record(t) for t in batch.trajectories]

    def on_predict_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        parts = pl_module.strategy.gather_objects(self._predictions)
        directory = Path(trainer.log_dir or trainer.default_root_dir)  # a broadcast: on every process
        self._predictions = []
        if trainer.is_global_zero:
            path = directory / "completions.jsonl"
            write_records(path, chain(*parts))
            rank_zero_info(f"{sum(map(len, parts))} completions written to {path}")
