"""What DPO and KTO share: the sequences of a step with what the reference says of them, and held-out means."""

from __future__ import annotations

import math
from typing import Any

from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import MeanMetric

from rl2lightning.algorithms.base import PostTrainingModule
from rl2lightning.models.policy import Policy
from rl2lightning.types import ChatBatch, Sequences


class PreferenceModule(PostTrainingModule):
    """Base of the algorithms that learn from labelled answers, most of them beside a frozen reference.

    A subclass writes `loss`, `check` and `keeps_reference`.

    Args:
        **kwargs: see `PostTrainingModule`.
    """

    checkpoint_exclude = ("reference",)  # it is found again in the model directory

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.reference: Policy | None = None
        self._held_out: dict[str, MeanMetric] = {}  # of the epoch that is being evaluated

    # ---- the reference

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference is in memory all the time."""
        raise NotImplementedError

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

    def check(self, seqs: Sequences) -> None:
        """Raises where the sequences of a step are not what the loss needs."""
        raise NotImplementedError

    def loss(self, seqs: Sequences) -> tuple[Tensor | tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Unreduced loss of a micro-batch and what is logged of it; override it to try another."""
        raise NotImplementedError

    def gather(self, batch: ChatBatch) -> tuple[Sequences | None, int]:
        """The sequences of the whole step and how many were dropped, the same on every process."""
        if not isinstance(batch, ChatBatch):
            raise ValueError(f"{type(self).__name__} learns from answers that the data holds, not from prompts alone")
        mine = batch.sequences
        # margins say nothing here, and the rows of some processes may lack them
        seqs = self.strategy.gather_sequences(None if mine is None else mine.replace(margins=None))
        if seqs is not None:
            self.check(seqs)
        return seqs, sum(self.strategy.gather_objects(batch.num_dropped))

    def training_sequences(self, batch: ChatBatch) -> Sequences | None:
        """`gather` for training: with what was lost on the way logged."""
        seqs, num_dropped = self.gather(batch)
        self.report_lost(
            seqs,
            num_dropped,
            nothing_left="every sample of this step was dropped, as empty, the same twice or cut off by "
            "data.max_length: nothing was learned",
        )
        return seqs

    # ---- validation and test

    def validation_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def test_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch)

    def on_validation_epoch_end(self) -> None:
        self._log_held_out("val")

    def on_test_epoch_end(self) -> None:
        self._log_held_out("test")

    def measure(self, seqs: Sequences) -> dict[str, Tensor]:
        """Loss and diagnostics of held-out sequences."""
        raise NotImplementedError

    def weight_of(self, name: str, seqs: Sequences) -> int:
        """How many of what a mean is taken of the sequences hold."""
        return len(seqs)

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """What follows from the means of a whole evaluation."""
        return means

    def _evaluate(self, batch: ChatBatch) -> None:
        seqs, num_dropped = self.gather(batch)
        means = {} if seqs is None else self.measure(seqs)
        for name, mean in means.items():
            if name not in self._held_out:
                # what it is given is global; NaN stays NaN, and is not left out ("disable" would forget the weights)
                metric = MeanMetric(nan_strategy=math.nan, sync_on_compute=False)
                self._held_out[name] = metric.to(mean.device)
            assert seqs is not None
            self._held_out[name].update(mean, weight=self.weight_of(name, seqs))
        self._num_dropped += num_dropped

    _num_dropped = 0

    def _log_held_out(self, stage: str) -> None:
        held_out, self._held_out = self._held_out, {}
        self.log(f"{stage}/dropped_samples", float(self._num_dropped), batch_size=1, sync_dist=True)
        self._num_dropped = 0
        if not held_out:
            rank_zero_warn(f"every held-out sample was dropped: there is nothing to measure in {stage}")
        for name, x in self.finish({name: mean.compute() for name, mean in held_out.items()}).items():
            # global already; Lightning asks for `sync_dist` all the same
            self.log(f"{stage}/{name}", x, prog_bar=name in ("loss", "margin"), batch_size=1, sync_dist=True)
