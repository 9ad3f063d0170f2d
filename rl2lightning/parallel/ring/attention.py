"""Attention of packed sequences cut zigzag over a ring of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from rl2lightning.models.attention import AttentionSpec, KernelAttention
from rl2lightning.models.blocks import BackendName, BlockBackend, Demand, Gradients, Segments
from rl2lightning.models.kernels import announce, choose_backend
from rl2lightning.parallel.ring.layout import Zigzag
from rl2lightning.parallel.ring.rows import CutRows
from rl2lightning.parallel.ring.transports import Gather, Package, Ring, Transport

TransportName = Literal["auto", "ring", "gather", "package"]
_SHORT_SHARD = 4096  # rows of cut sequences per process, up to which one large kernel beats a ring of small ones


@dataclass(frozen=True, eq=False)
class RingedAttention(KernelAttention):
    """Attention of one rank's rows: cut sequences by a transport, whole ones (and padding) by a kernel alone."""

    cut: CutRows
    whole: Segments
    group: ProcessGroup
    transport: TransportName
    backend: BackendName
    gather_heads: int | None

    @staticmethod
    def of(
        layout: Zigzag,
        group: ProcessGroup,
        *,
        transport: TransportName,
        backend: BackendName,
        gather_heads: int | None = None,
    ) -> RingedAttention:
        rank = dist.get_rank(group)
        lengths = [layout.lengths[i] for i in layout.whole[rank]]
        padding = layout.padding(rank)
        whole = Segments.of([*lengths, *([padding] if padding else [])])
        return RingedAttention(CutRows.of(layout, rank), whole, group, transport, backend, gather_heads)

    def to(self, device: torch.device) -> RingedAttention:
        return replace(self, cut=self.cut.to(device), whole=self.whole.to(device))

    def _transport(self, q: Tensor, spec: AttentionSpec) -> Transport:
        """The same on every rank, for it goes by what all of them know."""
        name = self.transport
        if name == "auto":
            short = q.is_cuda and self.cut.total <= _SHORT_SHARD and self.backend != "cudnn"
            name = "gather" if short else "ring"
        if name == "gather" or (spec.window is not None and name == "ring"):
            return Gather(self.group, self.gather_heads)  # on a ring a window would need the distance between blocks
        return Ring(self.group) if name == "ring" else Package(self.group)

    def _plan(self, q: Tensor, spec: AttentionSpec) -> tuple[Transport, BlockBackend, BlockBackend]:
        """Transport and backend of what is cut, and the backend of what is whole."""
        transport = self._transport(q, spec)
        alone = choose_backend(self.backend, Demand.of(q, spec, self.whole))
        return transport, transport.backend(self.backend, q, spec, self.cut) if self.cut.total else alone, alone

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        transport, backend, alone = self._plan(q, spec)
        m, parts = self.cut.total, []
        if m:
            announce(f"attention of sequences cut over {self.cut.size} processes: {transport.name} on {backend.name}")
            parts.append(transport.forward(q[:m], k[:m], v[:m], self.cut, spec, backend))
        if self.whole.total:
            announce(f"attention of whole sequences: {alone.name}")
            parts.append(alone.forward(q[m:], k[m:], v[m:], self.whole, self.whole, True, spec))
        if len(parts) == 1:
            return parts[0][0].to(q.dtype), parts[0][1]
        return torch.cat([out.to(q.dtype) for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> Gradients:
        transport, backend, alone = self._plan(q, spec)
        m, parts = self.cut.total, []
        if m:
            cut = (dout[:m], q[:m], k[:m], v[:m], out[:m], lse[:, :m])
            parts.append(transport.backward(*cut, self.cut, spec, backend))
        if self.whole.total:
            whole = (dout[m:], q[m:], k[m:], v[m:], out[m:], lse[:, m:].contiguous())
            parts.append(alone.backward(*whole, self.whole, self.whole, True, spec))
        if len(parts) == 1:
            dq, dk, dv = parts[0]
            return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
        dq, dk, dv = (torch.cat([g.to(q.dtype) for g in grads]) for grads in zip(*parts, strict=True))
        return dq, dk, dv
