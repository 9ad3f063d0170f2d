"""The device mesh: one array of processes with four named axes, and the flattened views that collectives run over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

AXES = ("replicate", "shard", "context", "tensor")


def mesh_shape(
    world_size: int, *, replicate: int = 1, shard: int | Literal["auto"] = "auto", context: int = 1, tensor: int = 1
) -> tuple[int, int, int, int]:
    """Sizes of the four axes, `shard="auto"` taking what the others leave; their product must be the world size."""
    for name, size in (("replicate", replicate), ("shard", shard), ("context", context), ("tensor", tensor)):
        if isinstance(size, int) and size < 1:
            raise ValueError(f"strategy.{name}={size} must be at least 1")
    rest = replicate * context * tensor
    if shard == "auto":
        if world_size % rest:
            raise ValueError(
                f"{world_size} processes cannot be divided by replicate * context * tensor = {rest}; "
                "change trainer.devices or those sizes"
            )
        shard = world_size // rest
    if shard * rest != world_size:
        raise ValueError(
            f"replicate={replicate} * shard={shard} * context={context} * tensor={tensor} = {shard * rest} "
            f"does not equal the {world_size} processes started; set strategy.shard to 'auto' or change trainer.devices"
        )
    return replicate, shard, context, tensor


@dataclass(frozen=True)
class Meshes:
    """The 4-axis mesh and the views of it that collectives run over."""

    root: DeviceMesh  # replicate x shard x context x tensor
    data: DeviceMesh  # distinct batches: replicate x shard
    parameters: DeviceMesh  # what FSDP2 gets: shard, or replicate x shard (HSDP)
    loss: DeviceMesh  # every token of a step lies on it exactly once: replicate x shard x context

    @property
    def num_shards(self) -> int:
        return self.parameters.size(self.parameters.ndim - 1)


def build_meshes(device_type: str, shape: tuple[int, int, int, int]) -> Meshes:
    """The mesh over all processes and its flattened views; every process must call it."""
    root = init_device_mesh(device_type, shape, mesh_dim_names=AXES)
    data = root["replicate", "shard"]._flatten("data")
    loss = root["replicate", "shard", "context"]._flatten("loss")
    return Meshes(root, data, root["replicate", "shard"] if shape[0] > 1 else root["shard"], loss)
