"""Adapters under tensor parallelism: A and B are cut like the matrix they belong to."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard

from rl2lightning.models.lora import Adapters
from rl2lightning.parallel.tensor_layers import Column, GatheredColumn, KeyValue, Row, SplitRow, Whole


def cut_adapters(adapters: Adapters, mesh: DeviceMesh, *, sequence_parallel: bool) -> None:
    """Cuts the adapters, on meta, of a model that `apply_tensor_parallel` has cut.

    Where a matrix is cut by outputs, so is B; every process computes all of A's few outputs, and knows that part of
    A's gradient which comes from its own outputs. Where a matrix is cut by inputs, so is A, whose few outputs are added
    up as the matrix's are, and B works on what is then whole, or cut by rows.
    """
    if mesh.size() == 1:
        return
    stream = Shard(1) if sequence_parallel else Replicate()
    kv_heads = adapters.lm.config.get_text_config().num_key_value_heads
    for name, layer in adapters.layers.items():
        down, up = adapters.pair(name)
        base = layer.base_layer
        if isinstance(base, Row):
            (SplitRow if isinstance(base, SplitRow) else Row).take(down, mesh, out=stream)
            Whole.take(up, mesh, grads=Partial() if sequence_parallel else Replicate())
            continue
        Whole.take(down, mesh, grads=Partial())
        if isinstance(base, KeyValue):
            KeyValue.take(up, mesh, num_heads=kv_heads)
        else:
            assert isinstance(base, Column), f"{name} is cut as none of the known layers"
            (GatheredColumn if isinstance(base, GatheredColumn) else Column).take(up, mesh)
