"""Layers that hold a part of their parameters, or parameters that several processes hold alike.

`become` makes one out of a layer of a Hugging Face model. Parameters are DTensors on the mesh axis `tensor`, which is
all that FSDP2, clipping, optimizers and checkpoints see; the arithmetic runs on this process's part of them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor


def cross(x: Tensor, mesh: DeviceMesh, source: Placement, target: Placement, grads: Placement | None = None) -> Tensor:
    """Takes this process's part of an activation from one placement to another, and its gradient the other way.

    `grads` is the placement of the result's gradient where it is not that of the result: Partial where each process
    knows the part of it that comes from its own share of the work.
    """
    moved = DTensor.from_local(x, mesh, [source], run_check=False).redistribute(mesh, [target])
    return moved.to_local(grad_placements=None if grads is None else [grads])


def local(p: Tensor | None, grads: Placement | None = None) -> Any:
    """This process's part of a parameter; `grads` as in `cross`. FSDP adds partial gradients up, once a step."""
    if p is None:
        return None
    assert isinstance(p, DTensor)
    return p.to_local(grad_placements=None if grads is None else [grads])


def distribute(module: nn.Module, mesh: DeviceMesh, **placements: Placement) -> None:
    """Turns a module's parameters into DTensors, without communication: every process holds the same, or meta."""
    for name, p in module._parameters.items():
        if p is not None:
            part = distribute_tensor(p.detach(), mesh, [placements[name]], src_data_rank=None)
            module._parameters[name] = nn.Parameter(part, requires_grad=p.requires_grad)


def become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Puts the forward of `kind` before that of the module's own class, as `fully_shard` does with its hooks."""
    module.__class__ = _both(kind, type(module))


@cache
def _both(kind: type[nn.Module], own: type[nn.Module]) -> type[nn.Module]:
    """One class for all blocks of a model: torch.compile would compile each anew for the type of its layers."""
    return type(f"{kind.__name__}{own.__name__}", (kind, own), {})


class Column(nn.Linear):
    """Cut by outputs."""

    @classmethod
    def take(cls, module: nn.Module, mesh: DeviceMesh) -> None:
        _refuse_uneven(module, 0, mesh)
        distribute(module, mesh, weight=Shard(0), bias=Shard(0))
        become(module, cls)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, local(self.weight), local(self.bias))


class GatheredColumn(Column):
    """Cut by outputs, which are put together again: what follows slices or normalises the whole width."""

    def forward(self, input: Tensor) -> Tensor:
        mesh = self.weight.device_mesh  # type: ignore[attr-defined]
        return cross(super().forward(input), mesh, Shard(input.ndim - 1), Replicate())


class KeyValue(nn.Linear):
    """Keys or values with fewer heads than processes: the weight is whole, the one head needed is computed."""

    rows: slice

    @classmethod
    def take(cls, module: nn.Module, mesh: DeviceMesh, *, num_heads: int) -> None:
        assert isinstance(module, nn.Linear)
        distribute(module, mesh, weight=Replicate(), bias=Replicate())
        become(module, cls)
        head, head_dim = mesh.get_local_rank() * num_heads // mesh.size(), module.out_features // num_heads
        module.rows = slice(head * head_dim, (head + 1) * head_dim)  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        weight, bias = local(self.weight, Partial()), local(self.bias, Partial())
        return F.linear(input, weight[self.rows], None if bias is None else bias[self.rows])


class Row(nn.Linear):
    """Cut by inputs; the processes' products are added up, and stay whole or are cut by rows (`out`)."""

    out: Placement

    @classmethod
    def take(cls, module: nn.Module, mesh: DeviceMesh, *, out: Placement) -> None:
        _refuse_uneven(module, 1, mesh)
        distribute(module, mesh, weight=Shard(1), bias=Replicate())
        become(module, cls)
        module.out = out  # type: ignore[assignment]

    def forward(self, input: Tensor) -> Tensor:
        mesh = self.weight.device_mesh  # type: ignore[attr-defined]
        out = cross(F.linear(input, local(self.weight)), mesh, Partial(), self.out)
        if self.bias is None:
            return out
        return out + local(self.bias, Partial() if self.out.is_shard() else None)


class SplitRow(Row):
    """Cut by inputs, which arrive whole."""

    def forward(self, input: Tensor) -> Tensor:
        mesh = self.weight.device_mesh  # type: ignore[attr-defined]
        return super().forward(cross(input, mesh, Replicate(), Shard(input.ndim - 1)))


def _refuse_uneven(module: nn.Module, dim: int, mesh: DeviceMesh) -> None:
    assert isinstance(module, nn.Linear)
    if module.weight.shape[dim] % mesh.size():
        raise ValueError(
            f"a matrix of shape {list(module.weight.shape)} cannot be cut evenly along its "
            f"{('outputs', 'inputs')[dim]} by strategy.tensor={mesh.size()} processes; choose another size"
        )


class _OwnForward(nn.Module):
    """The module's own forward, with this process's parts in the place of its parameters."""

    grads: Placement | None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self._parameters.copy()
        for name, p in parameters.items():
            self._parameters[name] = local(p, self.grads)
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._parameters.update(parameters)


class Whole(_OwnForward):
    """The same parameters on every process: norms, scalar heads."""

    @classmethod
    def take(cls, module: nn.Module, mesh: DeviceMesh, *, grads: Placement) -> None:
        distribute(module, mesh, **dict.fromkeys(module._parameters, Replicate()))
        become(module, cls)
        module.grads = grads  # type: ignore[assignment]


class Words(_OwnForward):
    """An embedding cut by words: each process looks up its own and has zeros for the others', which are added up."""

    mesh: DeviceMesh
    out: Placement
    first: int
    num_words: int

    @classmethod
    def take(cls, module: nn.Embedding, mesh: DeviceMesh, *, out: Placement) -> None:
        first = -(-module.num_embeddings // mesh.size()) * mesh.get_local_rank()  # as DTensor cuts
        distribute(module, mesh, weight=Shard(0))
        num_words = local(module.weight).shape[0]
        if module.padding_idx is not None:  # the word that gets no gradient, if it is one of ours
            ours = first <= module.padding_idx < first + num_words
            module.padding_idx = module.padding_idx - first if ours else None
        become(module, cls)
        vars(module).update(mesh=mesh, out=out, grads=None, first=first, num_words=num_words)

    def forward(self, ids: Tensor) -> Tensor:
        words = ids - self.first
        absent = (words < 0) | (words >= self.num_words)
        found = super().forward(words.masked_fill(absent, 0)).masked_fill(absent.unsqueeze(-1), 0)
        return cross(found, self.mesh, Partial(), self.out)
