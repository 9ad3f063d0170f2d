"""Run under torchrun: attention of sequences spread over a ring against the plain formula; rank 0 writes the errors.

Every case is a function of the same global tensors; the tests look at the errors alone.
"""

import argparse
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl2lightning.models.attention import AttentionSpec
from rl2lightning.parallel.ring.attention import RingedAttention
from rl2lightning.parallel.ring.layout import zigzag


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    key_heads: int = 2
    split_from: int | None = 0
    window: int | None = None
    softcap: float | None = None
    row_multiple: int = 1
    gather_heads: int | None = None


CASES = {
    "one_odd": Case((37,)),
    "several_odd": Case((9, 33, 1, 20)),
    "multi_head": Case((21, 10), key_heads=4),
    "multi_query": Case((21, 10), key_heads=1),
    "whole_and_cut": Case((40, 3, 5, 24, 7), split_from=20),
    "all_whole": Case((6, 9, 4), split_from=100),
    "many_short": Case(tuple(range(1, 14)), split_from=9),
    "ranks_without_rows": Case((5,), split_from=6),
    "softcap": Case((19, 30), softcap=1.5),
    "window": Case((41, 12), window=7),
    "window_and_softcap": Case((41, 12, 5), window=7, softcap=1.5, split_from=8),
    "padded_rows": Case((17, 4), row_multiple=6, split_from=5),
    "one_head_at_a_time": Case((23,), heads=6, key_heads=3, gather_heads=1),
    "two_heads_then_one": Case((23,), heads=6, key_heads=3, gather_heads=2),
}
HEAD_SIZE = 8


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Softmax over the keys that a mask leaves, all sequences in one matrix: [n, H, D]."""
    owner = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (owner[:, None] == owner) & (distance >= 0)
    if case.window is not None:
        seen &= distance < case.window
    groups = case.heads // case.key_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_SIZE**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference).abs().max() / reference.abs().max())


def run(case: Case, transport: str, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative errors of output and gradients, over all ranks."""
    g = torch.Generator().manual_seed(0)
    n = sum(case.lengths)
    shapes = [(n, case.heads), (n, case.key_heads), (n, case.key_heads), (n, case.heads)]
    q, k, v, dout = (torch.randn(*shape, HEAD_SIZE, generator=g, dtype=torch.float64) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    reference = plain(q, k, v, case)
    expected = [reference, *torch.autograd.grad(reference, leaves, dout)]

    rank, size = dist.get_rank(), dist.get_world_size()
    layout = zigzag(case.lengths, size, split_from=case.split_from, row_multiple=case.row_multiple)
    attention = RingedAttention.of(
        layout, dist.group.WORLD, transport=transport, backend="math", gather_heads=case.gather_heads
    )
    tokens = layout.rows(rank)[0]
    assert len(tokens) % case.row_multiple == 0
    assert len(tokens) > 0
    real = (tokens >= 0)[:, None, None]
    # what stands on padding is never looked at: make it large, and let nothing flow back from it
    mine = [torch.where(real, x.detach()[tokens.clamp(min=0)], 50.0).to(dtype).requires_grad_() for x in leaves]
    spec = AttentionSpec(HEAD_SIZE**-0.5, case.window, case.softcap)
    out = attention(*mine, spec)
    gradients = torch.autograd.grad(out, mine, torch.where(real, dout[tokens.clamp(min=0)], 0.0).to(dtype))

    errors = {}
    for name, rows, whole in zip(("out", "dq", "dk", "dv"), (out, *gradients), expected, strict=True):
        ours = torch.zeros_like(whole).index_add_(
            0, tokens.clamp(min=0), torch.where(real, rows.detach(), 0.0).double()
        )
        dist.all_reduce(ours)
        errors[name] = relative_error(ours, whole.detach())
        assert torch.isfinite(rows).all()
    return errors


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    results = {
        f"{name}/{transport}/{str(dtype).removeprefix('torch.')}": run(case, transport, dtype)
        for (name, case), transport, dtype in itertools.product(
            CASES.items(), ("ring", "gather"), (torch.float32, torch.float64)
        )
    }
    if dist.get_rank() == 0:
        torch.save(results, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
