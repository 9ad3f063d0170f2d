"""What modules, data and callbacks ask of the processes of a run, whatever its mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from rl2lightning.parallel.mesh import Meshes
from rl2lightning.types import Sequences


class Collectives:
    """The strategy's ranks, sums and gathers. Processes of one replica (context x tensor) work on the same batches."""

    meshes: Meshes  # from setup_environment on

    @property
    def data_rank(self) -> int:
        """Which share of a global batch this process loads; processes along context and tensor axes agree."""
        return self.meshes.data.get_local_rank()

    @property
    def data_size(self) -> int:
        return self.meshes.data.size()

    @property
    def gradient_scale(self) -> int:
        """FSDP averages gradients over the processes that tokens are spread over; the loss is multiplied by that."""
        return self.meshes.gradient_scale

    def max_over_processes(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
        return x

    def gather_objects(self, x: Any) -> list[Any]:
        """One picklable object from each data rank, in rank order, on every rank; through host memory."""
        if self.data_size == 1:
            return [x]
        parts: list[Any] = [None] * self.data_size
        dist.all_gather_object(parts, x, group=self.meshes.data.get_group())
        return parts

    def gather_sequences(self, seqs: Sequences | None) -> Sequences | None:
        """The sequences of all data ranks, in rank order, on every rank; None where no rank has any."""
        parts = [part for part in self.gather_objects(seqs) if part is not None]
        return Sequences.concat(parts) if parts else None

    def sum_over_data(self, x: Tensor) -> Tensor:
        """All-reduced sum over the processes that hold distinct batches; those of one replica hold the same."""
        dist.all_reduce(x, group=self.meshes.data.get_group())
        return x
