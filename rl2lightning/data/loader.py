"""Sized loaders that hand out one item per optimizer step; where they stand is a global counter outside of them.

A global batch does not depend on the number of ranks: rank r of R takes a contiguous share, so that the shares in rank
order are the batch on any layout. The counters therefore mean the same on every rank, and a checkpoint of one layout
resumes on another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch

from rl2lightning.data.sources import Split
from rl2lightning.types import PromptBatch, Row

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


def share(items: Sequence[T], rank: int, size: int) -> Sequence[T]:
    """The contiguous part of `items` that rank `rank` of `size` takes; lengths differ by at most one, and may be 0."""
    return items[len(items) * rank // size : len(items) * (rank + 1) // size]


@dataclass
class Position:
    """How far training has come through the data: global counters, equal on every rank, never reset within a run."""

    step: int = 0  # optimizer steps whose batch was handed out
    prompt: int = 0  # prompts taken off the stream, refills included; rollout algorithms only


@dataclass
class RowOrder:
    """The endless order in which training rows are seen: each pass has its own weighted draw and permutation."""

    split: Split
    seed: int
    _pass: int = field(default=-1, init=False)
    _order: list[int] = field(default_factory=list, init=False, repr=False)  # of the pass used last

    def __post_init__(self) -> None:
        self.rows_per_pass = len(self.of_pass(0))

    def reseed(self, seed: int) -> None:
        """Takes another seed from now on."""
        self.seed, self._pass = seed, -1

    def of_pass(self, number: int) -> list[int]:
        """Row indices in the order of that pass; a function of the seed and the pass alone."""
        if number != self._pass:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
            mixed = self.split.rows.mixture(self.split.indices, generator)
            self._order = [mixed[i] for i in torch.randperm(len(mixed), generator=generator).tolist()]
            self._pass = number
        return self._order

    def __getitem__(self, position: int) -> int:
        """Row index at a position of the stream."""
        number, offset = divmod(position, self.rows_per_pass)
        return self.of_pass(number)[offset]


class Encoder(Protocol[T_co]):
    """Turns rows into what a training or validation step takes. Runs in loader workers: picklable, no state."""

    def __call__(self, rows: Sequence[tuple[int, Row, str]]) -> T_co:
        """The batch of (position, row, how an error names the row)."""
        ...


@dataclass
class GlobalBatches(Generic[T]):
    """Maps an optimizer step to this rank's batch; a map-style data set, so that a DataLoader's workers can run it.

    Args:
        split: the rows.
        batch_size: rows of a global batch, over all ranks.
        encoder: makes the batch of this rank's rows.
        rank, size: of the data-parallel ranks.
        order: reshuffles in every pass; None keeps the rows in order.
        drop_last: leave out the incomplete last batch of a pass.
    """

    split: Split
    batch_size: int
    encoder: Encoder[T]
    rank: int
    size: int
    order: RowOrder | None = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size={self.batch_size} must be at least 1")
        num_rows = self._num_rows
        if self.drop_last and num_rows < self.batch_size:
            raise ValueError(
                f"batch_size={self.batch_size} is larger than the {num_rows} rows of a pass: "
                "lower it or set drop_last to false"
            )

    def __len__(self) -> int:
        """Batches in one pass."""
        return self._num_rows // self.batch_size if self.drop_last else -(-self._num_rows // self.batch_size)

    def __getitem__(self, step: int) -> T:
        number, batch = divmod(step, len(self))
        order = self.split.indices if self.order is None else self.order.of_pass(number)
        batch_positions = range(len(order))[batch * self.batch_size : (batch + 1) * self.batch_size]
        rows = self.split.rows
        return self.encoder(
            [(p, rows[order[p]], rows.where(order[p])) for p in share(batch_positions, self.rank, self.size)]
        )

    @property
    def _num_rows(self) -> int:
        return len(self.split) if self.order is None else self.order.rows_per_pass


class ResumableLoader:
    """Tells Lightning that resuming inside an epoch is safe; the position itself travels with the data module."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class StepLoader(ResumableLoader, Generic[T]):
    """Hands out the batches of `len(self)` steps, from where the position stands when iteration starts.

    The position is read at the first `next`, not before: Lightning may build and even iterate loaders before it has
    restored a checkpoint. It counts on beyond a pass, so that epochs cut short (`limit_train_batches`) go on with the
    data they did not reach. Creating an iterator leaves the global random state alone.
    """

    def __init__(self, batches: GlobalBatches[T], *, position: Position | None = None, num_workers: int = 0) -> None:
        self.batches, self.position, self.num_workers = batches, position, num_workers

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[T]:
        position = self.position if self.position is not None else Position()  # validation always begins at 0
        for batch in self._fetch(range(position.step, position.step + len(self))):
            position.step += 1
            yield batch

    def _fetch(self, steps: range) -> Iterator[T]:
        if not self.num_workers:
            return (self.batches[step] for step in steps)
        loader = torch.utils.data.DataLoader(
            self.batches,  # pyright: ignore[reportArgumentType]
            sampler=steps,
            batch_size=None,
            collate_fn=_as_it_is,
            num_workers=self.num_workers,
            generator=torch.Generator(),  # its own: the default draws the workers' seed from the global generator
        )
        return iter(loader)


def _as_it_is(batch: T) -> T:
    return batch


class PromptLoader(ResumableLoader):
    """One `PromptBatch` per optimizer step; prompts come with the first step of each rollout.

    Args:
        draw: takes the next n prompts off the global stream: rows and their positions in the stream.
        position: shared with `draw`; its step says how far the current rollout is.
        num_steps: optimizer steps of an epoch.
        prompts_per_rollout: over all ranks.
        steps_per_rollout: optimizer steps that one rollout feeds.
        rank, size: of the data-parallel ranks.
    """

    def __init__(
        self,
        draw: Callable[[int], tuple[list[Row], list[int]]],
        position: Position,
        *,
        num_steps: int,
        prompts_per_rollout: int,
        steps_per_rollout: int,
        rank: int,
        size: int,
    ) -> None:
        self.draw, self.position, self.num_steps = draw, position, num_steps
        self.prompts_per_rollout, self.steps_per_rollout = prompts_per_rollout, steps_per_rollout
        self.rank, self.size = rank, size

    def __len__(self) -> int:
        return self.num_steps

    def __iter__(self) -> Iterator[PromptBatch]:
        for _ in range(len(self)):
            step_of_rollout = self.position.step % self.steps_per_rollout
            rows, indices = self.draw(self.prompts_per_rollout) if step_of_rollout == 0 else ([], [])
            self.position.step += 1
            yield PromptBatch(
                rows=list(share(rows, self.rank, self.size)),
                indices=list(share(indices, self.rank, self.size)),
                step_of_rollout=step_of_rollout,
            )
