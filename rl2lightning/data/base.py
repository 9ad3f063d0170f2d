"""The LightningDataModule that ours share: sources, held-out split, checks, and the position in the data.

The position travels in the data module's `state_dict`, which Lightning restores whatever else happened to the loaders,
and it is global, so that a run resumes exactly, on any number of ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from rl2lightning.data.chat import load_tokenizer
from rl2lightning.data.encoders import PromptsOf, RowEncoder, naming
from rl2lightning.data.loader import GlobalBatches, Position, RowOrder, StepLoader, share
from rl2lightning.data.sources import Rows, Source, Split, load_rows, split_rows
from rl2lightning.seeding import run_seed
from rl2lightning.types import ChatBatch, PromptBatch

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_READ_AHEAD = 512  # rows of a batch that nobody learns from


class RowDataModule(L.LightningDataModule, ABC):
    """What all our data modules share: sources, tokenizer, held-out split, position.

    Every row is checked in `setup`, so that a bad one ends the run before it began, under its number and file.

    Args:
        path: a source of rows, or several with weights; see `Source` for what a path may be.
        val_path: held-out rows of their own; then `val_ratio` is not used.
        val_ratio: share of `path` that is held out otherwise; 0 trains on everything and does not validate.
        val_batch_size: held-out rows of one batch over all ranks; None takes the training batch size.
        split_seed: picks the held-out rows.
        seed: order of the training rows, shuffled anew in each pass; None: that of the run (`seed_everything`).
        num_workers: processes per rank that prepare batches; 0 does it in the training process.
    """

    batch_setting = "batch_size"  # the setting that says how much data one count of the position is

    def __init__(
        self,
        path: str | Source | list[str | Source],
        *,
        val_path: str | Source | list[str | Source] | None = None,
        val_ratio: float = 0.05,
        val_batch_size: int | None = None,
        split_seed: int = 0,
        seed: int | None = None,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.path, self.val_path, self.val_ratio, self.split_seed = path, val_path, val_ratio, split_seed
        self.seed, self.num_workers = run_seed() if seed is None else seed, num_workers
        self.val_batch_size = val_batch_size
        self.position = Position()
        self.encoder: RowEncoder | None = None  # set up once, for all stages
        self._training_rows: dict[str, Any] = {}  # what a checkpoint says of them
        for name, size in ((self.batch_setting, self.global_batch_size), ("val_batch_size", val_batch_size)):
            if size is not None and size < 1:
                raise ValueError(f"data.{name}={size} must be at least 1")

    @property
    def global_batch_size(self) -> int:
        """Rows of one training batch over all ranks; of one rollout where there are rollouts."""
        return getattr(self, self.batch_setting)

    @abstractmethod
    def make_encoder(self) -> RowEncoder:
        """What makes batches of rows."""

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._trainer.lightning_module.tokenizer_path)

    def setup(self, stage: str) -> None:
        if self._trainer.overfit_batches:
            raise ValueError(
                f"overfit_batches={self._trainer.overfit_batches} has no effect on these loaders: "
                "use a small data set, or split@path with a slice such as 'train[:64]@path'"
            )
        if stage == "fit" and self._trainer.global_step == 0:  # a new run; a checkpoint is restored after this
            self.position.step = self.position.prompt = 0
        if self.encoder is not None:
            return
        encoder = self.make_encoder()
        rows = load_rows(self.path)
        if self.val_path is None:
            train, val = split_rows(len(rows), self.val_ratio, self.split_seed)
            kept = self._check(rows, encoder)
            self.train_split = Split(rows, [i for i in train if i in kept])
            self.val_split = Split(rows, [i for i in val if i in kept])
        else:
            val_rows = load_rows(self.val_path)
            self.train_split = Split(rows, sorted(self._check(rows, encoder)))
            self.val_split = Split(val_rows, sorted(self._check(val_rows, encoder)))
        if not len(self.train_split):
            raise ValueError(f"none of the {len(rows)} rows of {self.path!r} is left to train on")
        encoder([(0, rows[0], rows.where(0))])  # a chat template that fails does so here
        self.order = RowOrder(self.train_split, self.seed)
        self._training_rows = {
            "rows_per_pass": self.order.rows_per_pass,
            "fingerprint": self.train_split.fingerprint(),
        }
        self.encoder = encoder

    @abstractmethod
    def train_dataloader(self) -> Any: ...

    def val_dataloader(self) -> Any:
        # `trainer.validating` would not tell: a fit sets it too, while it prepares its validation loop
        if not len(self.val_split) and self._trainer.state.fn == TrainerFn.FITTING:
            return []  # fit without validation, which val_ratio=0 asks for
        return self._held_out(self._encoder)

    def test_dataloader(self) -> Any:
        return self._held_out(self._encoder)

    def predict_dataloader(self) -> StepLoader[Any]:
        samples = self._trainer.lightning_module.predicts_completions
        return self._held_out(PromptsOf(self._encoder) if samples else self._encoder)

    def read_ahead(self, *, training: bool) -> list[StepLoader[Any]]:
        """Loaders of all held-out rows and, if asked for, training rows, each row once; the position stays."""
        splits = [self.val_split, *([self.train_split] if training else [])]
        size = max(self.global_batch_size, _READ_AHEAD)
        batches = [
            GlobalBatches(split, size, self._encoder, rank=self._rank, size=self._size)
            for split in splits
            if len(split)
        ]
        return [StepLoader(part, num_workers=self.num_workers) for part in batches]

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.position.step,
            "prompt": self.position.prompt,
            "seed": self.seed,
            self.batch_setting: self.global_batch_size,
            **self._training_rows,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict[self.batch_setting]
        goes_on = self._trainer.state.fn == TrainerFn.FITTING  # nothing else reads on where the checkpoint was
        if saved != self.global_batch_size and goes_on:
            rank_zero_warn(
                f"data.{self.batch_setting}={self.global_batch_size} was {saved} in the checkpoint: "
                "some rows of this pass are seen twice or not at all"
            )
        if goes_on:
            self._warn_of_other_rows(state_dict)
        self.position.step, self.position.prompt = state_dict["step"], state_dict["prompt"]
        self.seed = state_dict["seed"]  # a run keeps its order, whatever seed it is resumed with
        if self.encoder is not None:
            self.order.reseed(self.seed)

    def _warn_of_other_rows(self, state_dict: dict[str, Any]) -> None:
        """Compares with what the checkpoint says of its training rows; older ones say nothing."""
        now = self._training_rows
        saved = {key: state_dict.get(key, value) for key, value in now.items()}
        if saved == now:
            return
        others = "other training rows than the checkpoint"
        count, saved_count = now["rows_per_pass"], saved["rows_per_pass"]
        if count != saved_count:
            others = f"{count} training rows in a pass, where the checkpoint had {saved_count}"
        rank_zero_warn(
            f"data.path={self.path!r} gives {others}: the run goes on at the same step among them, "
            "so that rows are seen twice or not at all in this pass"
        )

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        if isinstance(batch, (PromptBatch, ChatBatch)):
            return batch  # stays in host memory, where micro-batches are planned; the module moves those
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        """This rank's contiguous part of something that is the same on all ranks."""
        return share(items, self._rank, self._size)

    def _check(self, rows: Rows, encoder: RowEncoder) -> set[int]:
        """Indices of the rows that are used."""
        kept = set()
        for i, row in enumerate(rows):
            with naming(rows.where(i)):
                if encoder.keeps(encoder.normalise(row)):
                    kept.add(i)
        return kept

    def _held_out(self, encoder: RowEncoder) -> StepLoader[Any]:
        """Every held-out row exactly once over all ranks, in order."""
        if not len(self.val_split):
            raise ValueError(
                f"there are no held-out rows: set data.val_path or data.val_ratio (it is {self.val_ratio})"
            )
        batches = GlobalBatches(
            self.val_split, self.val_batch_size or self.global_batch_size, encoder, rank=self._rank, size=self._size
        )
        return StepLoader(batches, num_workers=self.num_workers)

    def _training_steps(self, *, drop_last: bool) -> StepLoader[Any]:
        batches = GlobalBatches(
            self.train_split,
            self.global_batch_size,
            self._encoder,
            rank=self._rank,
            size=self._size,
            order=self.order,
            drop_last=drop_last,
        )
        return StepLoader(batches, position=self.position, num_workers=self.num_workers)

    @property
    def _encoder(self) -> RowEncoder:
        assert self.encoder is not None, "setup comes before the loaders"
        return self.encoder

    @property
    def _trainer(self) -> Any:  # untyped: our strategies and modules know more than Lightning's do
        assert self.trainer is not None
        return self.trainer

    @property
    def _rank(self) -> int:
        return self._trainer.strategy.data_rank

    @property
    def _size(self) -> int:
        return self._trainer.strategy.data_size
