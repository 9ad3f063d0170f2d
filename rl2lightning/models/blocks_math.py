"""Block attention in plain matrix products: what every kernel is measured against, and what none of them serves."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rl2lightning.models.attention import AttentionSpec, accumulator
from rl2lightning.models.blocks import BlockBackend, Demand, Forward, Gradients, Segments

_SCORES = 2**28  # scores held at once: 1 GiB in fp32


class Math(BlockBackend):
    """Plain matrix products in fp32 or fp64, some queries at a time: the CPU, and what no kernel serves."""

    name = "math"

    def refusal(self, demand: Demand) -> str | None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec
    ) -> Forward:
        out = torch.zeros_like(q, dtype=accumulator(q.dtype), memory_format=torch.contiguous_format)
        lse = out.new_full((q.shape[1], q.shape[0]), -torch.inf)
        for tile in _tiles(cu_q, cu_k, q.shape[1]):
            scores, _ = tile.scores(q, k, causal, spec)
            lse_tile = scores.logsumexp(-1)
            weights = torch.exp(scores - lse_tile.masked_fill(lse_tile == -torch.inf, 0)[..., None])
            out[tile.rows] = _flat_heads(weights @ tile.keys(v)[:, None])
            lse[:, tile.rows] = lse_tile.flatten(0, 1)
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec,
    ) -> Gradients:  # fmt: skip
        wide, groups = accumulator(q.dtype), k.shape[1]
        dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
        for tile in _tiles(cu_q, cu_k, q.shape[1]):
            scores, slope = tile.scores(q, k, causal, spec)
            lse_tile = lse[:, tile.rows].to(wide).unflatten(0, (groups, -1))
            weights = torch.exp(scores - lse_tile.masked_fill(lse_tile == -torch.inf, 0)[..., None])
            queries, dout_tile, out_tile = (_by_group(x[tile.rows].to(wide), groups) for x in (q, dout, out))
            dv[tile.columns] += (weights.transpose(-1, -2) @ dout_tile).sum(1).transpose(0, 1)
            dweights = dout_tile @ tile.keys(v)[:, None].transpose(-1, -2)
            dscores = weights * (dweights - (dout_tile * out_tile).sum(-1, keepdim=True)) * spec.scale
            if slope is not None:
                dscores = dscores * slope
            dq[tile.rows] = _flat_heads(dscores @ tile.keys(k)[:, None])
            dk[tile.columns] += (dscores.transpose(-1, -2) @ queries).sum(1).transpose(0, 1)
        return dq, dk, dv


@dataclass(frozen=True)
class _Tile:
    """Some queries of a segment against all of its keys."""

    rows: slice  # of the packed queries
    columns: slice  # of the packed keys
    first: int  # the key that the first of the queries is aligned with

    def keys(self, x: Tensor) -> Tensor:
        """Keys or values [n, H_kv, D] of the tile as [H_kv, columns, D]."""
        return x[self.columns].transpose(0, 1).to(accumulator(x.dtype))

    def scores(self, q: Tensor, k: Tensor, causal: bool, spec: AttentionSpec) -> tuple[Tensor, Tensor | None]:
        """Scores [H_kv, groups, rows, columns], -inf where masked, and the slope of the soft-capping."""
        queries = _by_group(q[self.rows].to(accumulator(q.dtype)), k.shape[1])
        scores = queries @ self.keys(k)[:, None].transpose(-1, -2) * spec.scale
        slope = None
        if spec.softcap is not None:
            tanh = torch.tanh(scores / spec.softcap)
            scores, slope = spec.softcap * tanh, 1 - tanh * tanh
        at = self.first + torch.arange(scores.shape[-2], device=q.device)[:, None]
        distance = at - torch.arange(scores.shape[-1], device=q.device)
        if causal:
            scores = scores.masked_fill(distance < 0, -torch.inf)
        if spec.window is not None:
            scores = scores.masked_fill(distance >= spec.window, -torch.inf)
        return scores, slope


def _tiles(cu_q: Segments, cu_k: Segments, num_heads: int) -> Iterator[_Tile]:
    """Tiles of bounded size that cover all queries and their keys."""
    for (a, b), (c, d) in zip(cu_q.spans, cu_k.spans, strict=True):
        step = max(1, _SCORES // max(1, num_heads * (d - c)))
        for row in range(a, b if d > c else a, step):
            # bottom right: query b - 1 is aligned with key d - 1
            yield _Tile(slice(row, min(b, row + step)), slice(c, d), row - a + (d - c) - (b - a))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[m, H, D] to [H_kv, H / H_kv, m, D]."""
    return x.unflatten(1, (groups, -1)).permute(1, 2, 0, 3)


def _flat_heads(x: Tensor) -> Tensor:
    """[H_kv, H / H_kv, m, D] to [m, H, D]."""
    return x.flatten(0, 1).transpose(0, 1)
