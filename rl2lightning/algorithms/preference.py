"""What RM, DPO and KTO share: the sequences of a step, what a reference says of them, and held-out means."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from rl2lightning.algorithms.base import PostTrainingModule
from rl2lightning.models.policy import Policy
from rl2lightning.types import ChatBatch, Sequences


class PreferenceModule(PostTrainingModule, ABC):
    """Base of the algorithms that learn from labelled answers, most of them beside a frozen reference.

    A subclass writes `loss`, `check` and `measure`, and says in `keeps_reference` whether there is a reference.

    Args:
        **kwargs: see `PostTrainingModule`.
    """

    checkpoint_exclude = ("reference",)  # it is found again in the model directory
    data_module = "PreferenceDataModule"  # whose rows it learns from
    shown: Collection[str] = ("loss", "margin")  # of what is held out, in the progress bar

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference: Policy | None = None
        self._begin_evaluation()

    # ---- the reference

    @property
    def keeps_reference(self) -> bool:
        """Whether a reference is in memory all the time."""
        return False

    def configure_model(self) -> None:
        super().configure_model()
        asked = self.trainer.state.fn != TrainerFn.PREDICTING  # which has no use for it
        if self.keeps_reference and self.reference is None and asked:
            self.reference = self.build_reference()

    def reference_logps(self, seqs: Sequences) -> Tensor:
        """[B] the reference's log-prob of each of all `seqs`, summed over its actions; the same on every process."""
        assert self.reference is not None
        return seqs.sum_per_sequence(self.score(self.reference, seqs))

    # ---- one step

    @abstractmethod
    def check(self, seqs: Sequences) -> None:
        """Raises where the sequences of a step are not what the loss needs."""

    @abstractmethod
    def loss(self, seqs: Sequences) -> tuple[Tensor | tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Unreduced loss of a micro-batch and what is logged of it; override it to try another."""

    def gather(self, batch: ChatBatch) -> tuple[Sequences | None, int]:
        """The sequences of the whole step and how many were dropped, the same on every process."""
        if not isinstance(batch, ChatBatch):
            raise ValueError(
                f"{type(self).__name__} learns from answers that the data holds, not from prompts alone: use "
                f"{self.data_module}"
            )
        mine = batch.sequences
        # before the gather: the rows of some processes may have margins, others none
        seqs = self.strategy.gather_sequences(None if mine is None else mine.replace(margins=self.margins(mine)))
        if seqs is not None:
            self.check(seqs)
        return seqs, sum(self.strategy.gather_objects(batch.num_dropped))

    def margins(self, seqs: Sequences) -> Tensor | None:
        """[B] margins of this process's sequences, all of them or, where they say nothing, None."""
        return None

    def training_sequences(self, batch: ChatBatch) -> Sequences | None:
        """`gather` for training: with what was lost on the way logged."""
        seqs, num_dropped = self.gather(batch)
        self.report_lost(
            seqs,
            num_dropped,
            reason="as empty, the same twice or cut off by data.max_length",
        )
        return seqs

    # ---- validation and test

    def validation_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_validation_epoch_start(self) -> None:
        self._begin_evaluation()

    def on_test_epoch_start(self) -> None:
        self._begin_evaluation()

    def on_validation_epoch_end(self) -> None:
        self._log_held_out("val")

    def on_test_epoch_end(self) -> None:
        self._log_held_out("test")

    @abstractmethod
    def measure(self, seqs: Sequences) -> dict[str, Tensor]:
        """Loss and diagnostics of held-out sequences, each a mean over what `weight_of` counts."""

    def weight_of(self, name: str, seqs: Sequences) -> int:
        """How many of what a mean is taken of the sequences hold."""
        return len(seqs)

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """What follows from the means of a whole evaluation."""
        return means

    def _begin_evaluation(self) -> None:
        # weighted sums of what was measured, and their weights; the same on every process
        self._held_out: dict[str, tuple[Tensor | float, int]] = {}
        self._num_dropped = 0  # likewise

    def _evaluate(self, batch: ChatBatch) -> None:
        seqs, num_dropped = self.gather(batch)
        means = {} if seqs is None else self.measure(seqs)
        for name, mean in means.items():
            assert seqs is not None
            weight, (total, weights) = self.weight_of(name, seqs), self._held_out.get(name, (0.0, 0))
            self._held_out[name] = (total + weight * mean.to(self.device, torch.float64), weights + weight)
        self._num_dropped += num_dropped

    def _log_held_out(self, stage: str) -> None:
        means: dict[str, Any] = {name: total / weight for name, (total, weight) in self._held_out.items()}
        self.log(f"{stage}/dropped_samples", float(self._num_dropped), batch_size=1, sync_dist=True)
        if not means:
            rank_zero_warn(f"every held-out sample was dropped: there is nothing to measure in {stage}")
        for name, x in self.finish(means).items():
            # global already; Lightning asks for `sync_dist` all the same
            self.log(f"{stage}/{name}", x.float(), prog_bar=name in self.shown, batch_size=1, sync_dist=True)
