"""The device mesh: one array of processes with four named axes, and the flattened views that collectives run over."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from rl2lightning.types import counted

AXES = ("replicate", "shard", "context", "tensor")


def mesh_shape(
    world_size: int, *, replicate: int = 1, shard: int | Literal["auto"] = "auto", context: int = 1, tensor: int = 1
) -> tuple[int, int, int, int]:
    """Sizes of the four axes, `shard="auto"` taking what the others leave; their product must be the world size."""
    for name, size in (("replicate", replicate), ("shard", shard), ("context", context), ("tensor", tensor)):
        if isinstance(size, int) and size < 1:
            raise ValueError(f"strategy.{name}={size} must be at least 1")
    rest = replicate * context * tensor
    processes = counted(world_size, "process", "processes")
    if shard == "auto":
        if world_size % rest:
            raise ValueError(
                f"{processes} cannot be divided by replicate * context * tensor = {rest}; "
                "change trainer.devices or those sizes"
            )
        shard = world_size // rest
    if shard * rest != world_size:
        raise ValueError(
            f"replicate={replicate} * shard={shard} * context={context} * tensor={tensor} = {shard * rest} "
            f"does not equal the {processes} started; set strategy.shard to 'auto' or change trainer.devices"
        )
    return replicate, shard, context, tensor


@dataclass(frozen=True)
class Meshes:
    """The 4-axis mesh and the views of it that collectives run over."""

    root: DeviceMesh  # replicate x shard x context x tensor
    data: DeviceMesh  # distinct batches: replicate x shard
    replica: DeviceMesh  # processes that work on the same micro-batches: context x tensor
    parameters: DeviceMesh  # what FSDP2 gets: shard x context as one axis, under replicate where that is more than 1
    tensor: DeviceMesh  # what tensor parallelism gets; of the same root as `parameters`, as FSDP2 demands

    @property
    def num_shards(self) -> int:
        return self.parameters.size(self.parameters.ndim - 1)

    @property
    def gradient_scale(self) -> int:
        """Over how many processes FSDP averages gradients: those that tokens are spread over."""
        return self.parameters.size()


def build_meshes(device_type: str, shape: tuple[int, int, int, int]) -> Meshes:
    """The mesh over all processes and its views; every process must call it.

    Of one shape they are the same for all fits of a process. What a fit has trained may be asked for long after its
    end, so their groups stay, and each has threads that poll and, on GPUs, a communicator with memory of its own.
    """
    assert dist.is_initialized()
    return _build_meshes(dist.group.WORLD, device_type, shape)


@lru_cache(maxsize=8)  # by the world, too: those of one that was destroyed are of no use to the next
def _build_meshes(world: dist.ProcessGroup | None, device_type: str, shape: tuple[int, int, int, int]) -> Meshes:
    replicate, shard, context, tensor = shape
    root = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    # a mesh of its own for the weights, because slices of flattened axes are on their way out of torch
    weights = init_device_mesh(
        device_type, (replicate, shard * context, tensor), mesh_dim_names=("replicate", "shard", "tensor")
    )
    return Meshes(
        root=root,
        data=root["replicate", "shard"]._flatten("data"),
        replica=root["context", "tensor"]._flatten("replica"),
        parameters=weights["replicate", "shard"] if replicate > 1 else weights["shard"],
        tensor=weights["tensor"],
    )
