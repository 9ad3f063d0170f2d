"""How keys and values reach the processes that share a sequence.

`Ring` passes keys from neighbour to neighbour while attending to those at hand; `Gather` collects all keys, some heads
at a time, and attends once; `Package` leaves it to ring-flash-attn.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from rl2lightning.compat import all_gather_single, reduce_scatter_single, restore_name_for_ring_flash_attn
from rl2lightning.models.attention import AttentionSpec, accumulator
from rl2lightning.models.blocks import BackendName, BlockBackend, Demand, Gradients, installed
from rl2lightning.models.kernels import choose_backend
from rl2lightning.parallel.ring.rows import CutRows

_ROUNDS = 4  # of `Gather`: keys of the next heads travel while those at hand are attended to


class Transport(ABC):
    """How keys reach the queries of the cut sequences."""

    name: str

    @abstractmethod
    def backend(self, name: BackendName, q: Tensor, spec: AttentionSpec, rows: CutRows) -> BlockBackend: ...

    @abstractmethod
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: CutRows, spec: AttentionSpec, backend: BlockBackend
    ) -> tuple[Tensor, Tensor]:
        """This rank's rows q [m, H, D], k and v [m, H_kv, D] to output [m, H, D] and log-sum-exp [H, m]."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        rows: CutRows, spec: AttentionSpec, backend: BlockBackend,
    ) -> Gradients: ...  # fmt: skip


@dataclass(frozen=True)
class Ring(Transport):
    """Keys and values go once around the ring, and every rank attends to those it holds while the next arrive.

    On rank r, keys from s ranks before it: s = 0 are its own; for s <= r they are an earlier rank's, of which the front
    chunk precedes all rows here and the back chunk none; for s > r they are a later rank's, of which both chunks
    precede the back rows here and none the front rows. So every step is the same work on all ranks.
    """

    group: ProcessGroup
    name = "ring"

    def backend(self, name: BackendName, q: Tensor, spec: AttentionSpec, rows: CutRows) -> BlockBackend:
        return choose_backend(name, Demand.of(q, spec, rows.full))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: CutRows, spec: AttentionSpec, backend: BlockBackend
    ) -> tuple[Tensor, Tensor]:
        hop = _Hop(self.group, rows, k, v)
        out, lse = backend.forward(q, k, v, rows.full, rows.full, True, spec)
        out, lse = out.to(accumulator(q.dtype)), lse.contiguous()
        late: tuple[Tensor, Tensor, Tensor] | None = None  # queries, output and log-sum-exp of the back rows
        for step in range(1, rows.size):
            k, v = hop.wait()
            if step + 1 < rows.size:
                hop = _Hop(self.group, rows, k, v)
            if step <= rows.rank:
                early_k, early_v = rows.front.take(k), rows.front.take(v)
                merge_(out, lse, *backend.forward(q, early_k, early_v, rows.full, rows.half, False, spec))
            else:
                if late is None:
                    late = rows.back.take(q), rows.back.take(out), rows.back.take(lse.t()).t()
                merge_(late[1], late[2], *backend.forward(late[0], k, v, rows.half, rows.full, False, spec))
        if late is not None:
            rows.back.put_(out, late[1])
            rows.back.put_(lse.t(), late[2].t())
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        rows: CutRows, spec: AttentionSpec, backend: BlockBackend,
    ) -> Gradients:  # fmt: skip
        types, wide = (q.dtype, k.dtype, v.dtype), accumulator(q.dtype)
        late_dout, late_q, late_out = (rows.back.take(x) for x in (dout, q, out))
        late_lse = rows.back.take(lse.t()).t().contiguous()
        keys_hop = _Hop(self.group, rows, k, v)
        dq, dk, dv = backend.backward(dout, q, k, v, out, lse, rows.full, rows.full, True, spec)
        dq, dk, dv = dq.to(wide), dk.to(wide), dv.to(wide)
        # the gradient of a block of keys follows it around the ring, one hop behind, and gathers what each rank adds
        grads_hop = _Hop(self.group, rows, dk, dv)
        for step in range(1, rows.size):
            k, v = keys_hop.wait()
            if step + 1 < rows.size:
                keys_hop = _Hop(self.group, rows, k, v)
            if step <= rows.rank:
                early_k, early_v = rows.front.take(k), rows.front.take(v)
                a, b, c = backend.backward(dout, q, early_k, early_v, out, lse, rows.full, rows.half, False, spec)
                dq.add_(a)
                dk, dv = grads_hop.wait()
                rows.front.add_(dk, b)
                rows.front.add_(dv, c)
            else:
                a, b, c = backend.backward(
                    late_dout, late_q, k, v, late_out, late_lse, rows.half, rows.full, False, spec
                )
                rows.back.add_(dq, a)
                dk, dv = grads_hop.wait()
                dk.add_(b)
                dv.add_(c)
            grads_hop = _Hop(self.group, rows, dk, dv)
        dk, dv = grads_hop.wait()
        return dq.to(types[0]), dk.to(types[1]), dv.to(types[2])


class _Hop:
    """Tensors on their way to the next rank, and those of the rank before on their way here."""

    def __init__(self, group: ProcessGroup, rows: CutRows, *tensors: Tensor) -> None:
        after, before = (dist.get_global_rank(group, (rows.rank + i) % rows.size) for i in (1, -1))
        self.sent = tuple(x.contiguous() for x in tensors)  # alive until they are sent
        self.received = tuple(torch.empty_like(x) for x in tensors)
        ops = [dist.P2POp(dist.isend, x, after, group) for x in self.sent]
        ops += [dist.P2POp(dist.irecv, x, before, group) for x in self.received]
        self.work = dist.batch_isend_irecv(ops)

    def wait(self) -> tuple[Tensor, ...]:
        for work in self.work:
            work.wait()
        return self.received


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Adds attention to another block of keys, in place.

    Args:
        out: [m, H, D] output over the keys so far, in the accumulator's type.
        lse: [H, m] its log-sum-exp.
        block_out: [m, H, D] output over further keys, in any type.
        block_lse: [H, m] its log-sum-exp.
    """
    (_compiled_merge() if out.is_cuda else _merge_)(out, lse, block_out, block_lse)


def _merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    share = torch.sigmoid(block_lse - lse).t()[..., None]  # of the block in the sum of exponentials
    out.add_((block_out.to(out.dtype) - out) * share)
    lse.copy_(torch.logaddexp(lse, block_lse))


@functools.cache
def _compiled_merge() -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """One pass over the outputs for what takes five. The number of rows becomes dynamic when it first changes."""
    return torch.compile(_merge_)


@dataclass(frozen=True)
class Gather(Transport):
    """All keys are gathered, some heads at a time, and every chunk attends to its whole past in one causal kernel.

    Nothing is merged, so it rounds as one process does; a window is a window; and short shards need no kernel per rank.
    It holds the keys of the heads at hand of the whole sequence.
    """

    group: ProcessGroup
    heads: int | None = None  # key heads gathered at a time; None: a quarter of them
    name = "gather"

    def backend(self, name: BackendName, q: Tensor, spec: AttentionSpec, rows: CutRows) -> BlockBackend:
        return choose_backend(name, Demand.of(q, spec, rows.each_chunk, square=False))

    def _rounds(self, num_heads: int) -> list[slice]:
        heads = self.heads or -(-num_heads // _ROUNDS)
        return [slice(i, min(i + heads, num_heads)) for i in range(0, num_heads, heads)]

    def _start(self, x: Tensor, size: int) -> tuple[Tensor, Work, Tensor]:
        whole, mine = x.new_empty(size * x.shape[0], *x.shape[1:]), x.contiguous()
        return whole, all_gather_single(whole, mine, self.group), mine

    def _keys(self, k: Tensor, v: Tensor, rows: CutRows) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Heads and the prefixes of their keys and values, round by round, the next round's already on its way."""
        rounds = self._rounds(k.shape[1])
        coming = [self._start(x[:, rounds[0]], rows.size) for x in (k, v)]
        for i, heads in enumerate(rounds):
            here = coming
            if i + 1 < len(rounds):
                coming = [self._start(x[:, rounds[i + 1]], rows.size) for x in (k, v)]
            for _, work, _ in here:
                work.wait()
            keys, values = (whole.index_select(0, rows.prefix) for whole, _, _ in here)
            yield heads, keys, values

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: CutRows, spec: AttentionSpec, backend: BlockBackend
    ) -> tuple[Tensor, Tensor]:
        outs, lses, groups = [], [], q.shape[1] // k.shape[1]
        for heads, keys, values in self._keys(k, v, rows):
            mine = _query_heads(heads, groups)
            out, lse = backend.forward(q[:, mine], keys, values, rows.each_chunk, rows.each_prefix, True, spec)
            outs.append(out.to(q.dtype))
            lses.append(lse)
        if len(outs) == 1:
            return outs[0], lses[0]
        return torch.cat(outs, 1), torch.cat(lses)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        rows: CutRows, spec: AttentionSpec, backend: BlockBackend,
    ) -> Gradients:  # fmt: skip
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        groups = q.shape[1] // k.shape[1]
        leaving: list[tuple[Tensor, Tensor, Work, Tensor]] = []
        for heads, keys, values in self._keys(k, v, rows):
            mine = _query_heads(heads, groups)
            some = (dout[:, mine], q[:, mine], keys, values, out[:, mine], lse[mine])
            a, b, c = backend.backward(*some, rows.each_chunk, rows.each_prefix, True, spec)
            dq[:, mine] = a
            for grad, target, work, _ in leaving:  # of the round before
                work.wait()
                target.copy_(grad)
            leaving = [self._reduce(x, target[:, heads], rows) for x, target in ((b, dk), (c, dv))]
        for grad, target, work, _ in leaving:
            work.wait()
            target.copy_(grad)
        return dq, dk, dv

    def _reduce(self, x: Tensor, target: Tensor, rows: CutRows) -> tuple[Tensor, Tensor, Work, Tensor]:
        """Gradients of the prefixes, added up and sent to the ranks whose keys they are."""
        whole = x.new_zeros(rows.size * rows.total, *x.shape[1:], dtype=accumulator(x.dtype))
        whole.index_add_(0, rows.prefix, x.to(whole.dtype))
        mine = whole.new_empty(rows.total, *x.shape[1:])
        return mine, target, reduce_scatter_single(mine, whole, self.group), whole


def _query_heads(heads: slice, groups: int) -> slice:
    """The query heads that look at these key heads."""
    return slice(heads.start * groups, heads.stop * groups)


@dataclass(frozen=True)
class Package(Transport):
    """ring-flash-attn's zigzag function over flash-attn: the same layout, one host synchronisation per sequence."""

    group: ProcessGroup
    name = "package"

    @staticmethod
    def refuse_if_missing() -> None:
        """Raises where the package is not installed."""
        if not installed("ring-flash-attn"):
            raise ValueError(
                "transport 'package' needs ring-flash-attn, which is not installed (pip install 'rl2lightning[ring]'); "
                "or set RingAttention.transport to 'ring'"
            )

    def backend(self, name: BackendName, q: Tensor, spec: AttentionSpec, rows: CutRows) -> BlockBackend:
        self.refuse_if_missing()
        if spec.window is not None or spec.softcap is not None:
            raise ValueError(
                "transport 'package' has neither windows nor soft-capping, which this model needs; "
                "set RingAttention.transport to 'auto'"
            )
        if name not in ("auto", "flash_attn"):
            raise ValueError(
                f"transport 'package' computes with flash-attn, not with '{name}'; set RingAttention.backend to 'auto'"
            )
        return choose_backend("flash_attn", Demand.of(q, spec, rows.full))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, rows: CutRows, spec: AttentionSpec, backend: BlockBackend
    ) -> tuple[Tensor, Tensor]:
        restore_name_for_ring_flash_attn()
        from ring_flash_attn import zigzag_ring_flash_attn_varlen_func

        out, lse, _ = zigzag_ring_flash_attn_varlen_func(
            q.contiguous(), k, v, rows.full.cu, rows.full.longest,
            softmax_scale=spec.scale, causal=True, return_attn_probs=True, group=self.group,
        )  # fmt: skip
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        rows: CutRows, spec: AttentionSpec, backend: BlockBackend,
    ) -> Gradients:  # fmt: skip
        from ring_flash_attn.zigzag_ring_flash_attn_varlen import (
            get_half_index,
            zigzag_ring_flash_attn_varlen_backward,
        )

        halves = [get_half_index(rows.full.cu, front=front) for front in (True, False)]
        return zigzag_ring_flash_attn_varlen_backward(
            self.group, dout, q.contiguous(), k.contiguous(), v.contiguous(), out, lse, rows.full.cu,
            rows.full.longest, *halves, softmax_scale=spec.scale,
        )  # fmt: skip
