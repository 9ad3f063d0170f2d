from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from rl2lightning.algorithms.optimizer import LocalAdamW


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of one process, under the group that another test has left, if one has."""
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    if ours:
        dist.destroy_process_group()


def test_parts_of_tensors_are_stepped_as_torch_steps_tensors(mesh: DeviceMesh) -> None:
    def learn(kind: type[torch.optim.AdamW]) -> tuple[list[Any], list[dict[str, Any]]]:
        g = torch.Generator().manual_seed(0)
        full = [torch.randn(4, 3, generator=g), torch.randn(5, generator=g), torch.randn(2, 2, generator=g)]
        placements = [Shard(0), Replicate(), Shard(1)]
        p = [nn.Parameter(distribute_tensor(x, mesh, [place])) for x, place in zip(full, placements, strict=True)]
        optimizer = kind([{"params": p[::2], "weight_decay": 0.1}, {"params": p[1:2]}], lr=0.03, fused=True)
        for skipped in (0.0, 1.0, 0.0):
            for x in p:
                x.grad = x.detach().sin() + 0.1
            optimizer.found_inf = torch.tensor(skipped)  # type: ignore[attr-defined]
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.step()
        return p, [optimizer.state[x] for x in p]

    (ours, our_state), (theirs, their_state) = learn(LocalAdamW), learn(torch.optim.AdamW)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())
    for a, b in zip(our_state, their_state, strict=True):
        assert a["step"] == b["step"] == 2
        for moment in ("exp_avg", "exp_avg_sq"):
            assert a[moment].placements == b[moment].placements  # checkpoints know whose part it is
            assert torch.equal(a[moment].full_tensor(), b[moment].full_tensor())
            assert bool(a[moment].full_tensor().any())
