"""Supervised fine-tuning: the negative log-likelihood of the tokens the data marks as trained."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from torchmetrics import MeanMetric

from rl2lightning.algorithms.base import LossLevel, PostTrainingModule
from rl2lightning.functional.losses import sft_loss
from rl2lightning.types import ChatBatch, Sequences


class SFT(PostTrainingModule):
    """Next-token cross-entropy on the trained tokens of conversations (`data.train_on` says which).

    Args:
        loss_level: token: every trained token counts alike; sequence: every conversation does.
        **kwargs: see `PostTrainingModule`.
    """

    def __init__(self, *args: Any, loss_level: LossLevel = "token", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if loss_level == "constant":
            raise ValueError("loss_level='constant' has no meaning for SFT: use 'token' or 'sequence'")
        self.loss_level: LossLevel = loss_level
        # what it is given is global already; NaN stays NaN, and is not left out
        self.held_out_loss = MeanMetric(nan_strategy=math.nan, sync_on_compute=False)

    def loss(self, seqs: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        logps, _ = self.logps(seqs)
        return sft_loss(logps), {}

    def training_step(self, batch: ChatBatch, batch_idx: int) -> None:
        seqs = self._gather(batch)
        self.report_lost(
            seqs,
            sum(self.strategy.gather_objects(batch.num_dropped)),
            reason="as data.max_length left nothing to train on",
        )
        self.update(seqs, self.loss, level=self.loss_level)

    def _gather(self, batch: ChatBatch) -> Sequences | None:
        seqs = self.strategy.gather_sequences(batch.sequences)
        if seqs is not None and seqs.labels is not None:
            raise ValueError(
                "these are pairs of better and worse answers, and SFT would imitate both: use ChatDataModule"
            )
        return seqs

    def validation_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch, "val/loss")

    def test_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch, "test/loss")

    def _evaluate(self, batch: ChatBatch, name: str) -> None:
        seqs = self._gather(batch)
        if seqs is None:
            return
        loss = self.evaluate(seqs, self.loss, level=self.loss_level)["loss"]
        self.held_out_loss.update(loss, weight=int(seqs.action_mask.sum()) if self.loss_level == "token" else len(seqs))
        self.log(name, self.held_out_loss, batch_size=1, prog_bar=True)
