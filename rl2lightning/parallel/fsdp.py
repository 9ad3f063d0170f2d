"""FSDP2 around a model: which blocks are sharded, when gradients are reduced, and how they are clipped."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor


def apply_fsdp(
    model: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    *,
    mp_policy: MixedPrecisionPolicy,
    reshard_after_forward: bool,
    in_host_memory: bool = False,
) -> None:
    """Shards each block and then what is left, the root; over a mesh of two axes (replicate, shard) this is HSDP.

    The root is resharded too: a root used under no_grad would otherwise keep its parameters gathered.
    `in_host_memory` keeps the shards there and fetches each block's when it runs.
    """
    kwargs: dict[str, Any] = {"mesh": mesh, "mp_policy": mp_policy, "reshard_after_forward": reshard_after_forward}
    if in_host_memory:
        kwargs["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda")
    for block in blocks:
        fully_shard(block, **kwargs)
    fully_shard(model, **kwargs)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Whether backward passes inside reduce gradients over the mesh; where not, each process adds up whole ones."""
    modules = fsdp_modules(model)
    for module in modules:
        module.set_requires_gradient_sync(enabled, recurse=False)
    try:
        yield
    finally:
        for module in modules:
            module.set_requires_gradient_sync(True, recurse=False)


@torch.no_grad()
def reshard(model: nn.Module) -> None:
    """Frees gathered parameters, so that the next forward gathers the current ones."""
    for module in fsdp_modules(model):
        module.reshard()


@torch.no_grad()
def clip_grad_norm(parameters: Iterable[nn.Parameter], max_norm: float | None) -> Tensor:
    """Global L2 norm of the gradients, which are scaled down to `max_norm` where it is larger (None: measured only).

    Gradients may live on different meshes; their norms are combined without a host synchronisation.
    """
    by_mesh: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for p in parameters:
        if p.grad is not None:
            by_mesh.setdefault(p.grad.device_mesh if isinstance(p.grad, DTensor) else None, []).append(p)
    if not by_mesh:
        return torch.zeros(())
    squares = [_squared_norm([p.grad for p in group if p.grad is not None], mesh) for mesh, group in by_mesh.items()]
    total = torch.stack(squares).sum().sqrt()
    if max_norm is not None:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        for group in by_mesh.values():
            # each process its own parts: DTensor would first plan the sharding of the whole list, for many seconds
            grads = [p.grad for p in group if p.grad is not None]
            parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
            torch._foreach_mul_(parts, scale.to(parts[0].device))
    return total


def _squared_norm(grads: list[Tensor], mesh: DeviceMesh | None) -> Tensor:
    """Sum of squares of gradients on a mesh: one number crosses each axis.

    Left to DTensor, a number for every parameter would, as soon as some are cut over an axis and others are not.
    """
    if mesh is None:
        return torch.nn.utils.get_total_norm(grads).square()
    by_copies: dict[int, list[Tensor]] = {}  # on how many processes the same part of a gradient is
    for grad in grads:
        assert isinstance(grad, DTensor)
        copies = math.prod(mesh.size(axis) for axis, placed in enumerate(grad.placements) if placed.is_replicate())
        by_copies.setdefault(copies, []).append(grad.to_local())
    squares = [torch.nn.utils.get_total_norm(parts).square() / copies for copies, parts in by_copies.items()]
    total = torch.stack(squares).sum()
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total
