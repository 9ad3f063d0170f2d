"""Packed micro-batches: what model and head need to know of sequences laid end to end, worked out once on the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl2lightning.models.attention import AttentionSpec, KernelAttention, PackedAttention, move
from rl2lightning.models.blocks import BackendName, BlockBackend, Demand, Segments
from rl2lightning.models.blocks_math import Math
from rl2lightning.models.kernels import announce, choose_backend
from rl2lightning.types import Sequences

PACKED_ATTENTION = "rl2lightning_packed"  # the name under which transformers finds it; must not contain "flash"
_MAX_PADDING = 0.25  # share of padding at which a bucket of the SDPA path is closed

Pack = Callable[[Sequences, torch.device, torch.dtype], Sequences]  # micro-batch, device, compute type -> with `layout`


@dataclass(frozen=True)
class PackedLayout:
    """The rows that this process runs through the model, and where their outputs belong.

    Row j predicts the token after it. Without sequence parallelism the m rows are the n tokens of the micro-batch.
    """

    input_ids: Tensor  # [m]
    position_ids: Tensor  # [m] position of each row in its sequence
    predictors: Tensor  # [a] rows whose next token is an action
    targets: Tensor  # [a] those next tokens
    actions: Tensor  # [a] where those tokens stand in the micro-batch, in [0, n)
    last_rows: Tensor  # [b] rows that hold the last token of a sequence
    last_of: Tensor  # [b] the sequences these rows end, in [0, B)
    attention: PackedAttention
    max_length: int  # tokens of the longest sequence
    join: Callable[[Tensor], Tensor] | None = None  # sums an output over the processes that share the micro-batch

    def to(self, device: torch.device) -> PackedLayout:
        tensors = {name: move(x, device) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, attention=self.attention.to(device), **tensors)

    def scatter_actions(self, x: Tensor, num_tokens: int) -> Tensor:
        """[a] of this process's predictors to [n], 0 off actions; whole on all processes that share the micro-batch."""
        # index_put into zeros keeps shapes static: no boolean indexing, so no host synchronisation
        out = x.new_zeros(num_tokens).index_put((self.actions,), x)
        return out if self.join is None else self.join(out)

    def scatter_last(self, x: Tensor, num_sequences: int) -> Tensor:
        """[b] of this process's last rows to [B], likewise."""
        out = x.new_zeros(num_sequences).index_put((self.last_of,), x)
        return out if self.join is None else self.join(out)


def layout_of(
    seqs: Sequences,
    attention: PackedAttention,
    *,
    tokens: Tensor | None = None,
    position_ids: Tensor | None = None,
    join: Callable[[Tensor], Tensor] | None = None,
) -> PackedLayout:
    """The layout, in host memory, of the rows that hold `tokens`.

    Args:
        seqs: the micro-batch, in host memory.
        attention: how those rows attend.
        tokens: [m] the token of the micro-batch behind each row, -1 for padding; None: all of them in order.
        position_ids: [m] positions of the rows in their sequences; None with `tokens` None.
        join: see `PackedLayout`.
    """
    if tokens is None:
        tokens, position_ids = torch.arange(seqs.num_tokens), seqs.position_ids
    assert position_ids is not None
    real, at = tokens >= 0, tokens.clamp(min=0)
    # an action is never the first token of a sequence, so the token before it in the row is the one before it in time
    before_action = seqs.action_mask.roll(-1)
    if seqs.num_tokens:
        before_action[-1] = False
    predictors = (before_action[at] & real).nonzero().flatten()
    actions = tokens[predictors] + 1
    is_last = torch.zeros(seqs.num_tokens, dtype=torch.bool)
    is_last[seqs.cu_seqlens[1:].long()[seqs.lengths > 0] - 1] = True
    last_rows = (is_last[at] & real).nonzero().flatten()
    return PackedLayout(
        input_ids=seqs.input_ids[at].masked_fill(~real, 0),
        position_ids=position_ids,
        predictors=predictors,
        targets=seqs.input_ids[actions],
        actions=actions,
        last_rows=last_rows,
        last_of=seqs.sequence_ids[tokens[last_rows]],
        attention=attention,
        max_length=int(seqs.lengths.max()) if len(seqs) else 0,
        join=join,
    )


def pack(
    seqs: Sequences,
    device: torch.device,
    dtype: torch.dtype,
    *,
    backend: BackendName = "auto",
    row_multiple: int = 1,
) -> Sequences:
    """The micro-batch on `device` with its `layout`.

    Args:
        seqs: the micro-batch, in host memory.
        device: where the model is.
        dtype: the compute type; on a GPU bf16 and fp16 have kernels over packed rows, other types are run in buckets.
        backend: which kernels; by name they are used for any type, or raise.
        row_multiple: the number of rows is brought to a multiple of this by one more sequence that nobody looks at.
    """
    if seqs.layout is not None:
        return seqs
    lengths, tokens, position_ids = seqs.lengths.tolist(), None, None
    if extra := -seqs.num_tokens % row_multiple:
        tokens = torch.cat([torch.arange(seqs.num_tokens), torch.full((extra,), -1)])
        position_ids = torch.cat([seqs.position_ids, torch.arange(extra)])
        lengths.append(extra)
    if backend != "auto" or uses_kernel(device, dtype):
        attention: PackedAttention = WholeSequences(Segments.of(lengths), backend)
    else:
        attention = Bucketed.of(lengths)
    layout = layout_of(seqs, attention, tokens=tokens, position_ids=position_ids)
    return with_layout(seqs, layout, device)


def with_layout(seqs: Sequences, layout: PackedLayout, device: torch.device) -> Sequences:
    """The micro-batch and its layout on the device."""
    if device.type == "cuda":
        seqs = seqs.pin_memory()
    return seqs.to(device, non_blocking=True).replace(layout=layout.to(device))


def uses_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels over packed rows for these tensors; otherwise SDPA runs bucket by bucket."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


@dataclass(frozen=True, eq=False)
class WholeSequences(KernelAttention):
    """A kernel takes the packed row as it is, every sequence whole on this process."""

    segments: Segments
    backend: BackendName = "auto"

    def to(self, device: torch.device) -> WholeSequences:
        return replace(self, segments=self.segments.to(device))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        chosen = self._choose(q, spec)
        # no kernel drops weights; and where none serves, SDPA in buckets is quicker than the bare mathematics
        if spec.dropout or (self.backend == "auto" and isinstance(chosen, Math) and spec.softcap is None):
            return self._bucketed(q, k, v, spec)
        announce(f"attention of whole sequences: {chosen.name}")
        return super().__call__(q, k, v, spec)

    def _choose(self, q: Tensor, spec: AttentionSpec) -> BlockBackend:
        return choose_backend(self.backend, Demand.of(q, spec, self.segments))

    @cached_property
    def _bucketed(self) -> Bucketed:
        lengths = [end - start for start, end in self.segments.spans]
        return Bucketed.of(lengths).to(self.segments.cu.device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        out, lse = self._choose(q, spec).forward(q, k, v, self.segments, self.segments, True, spec)
        return out.to(q.dtype), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        backend, rows = self._choose(q, spec), self.segments
        dq, dk, dv = backend.backward(dout, q, k, v, out, lse, rows, rows, True, spec)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, run as one dense batch padded on the right, where a causal mask already hides it."""

    num_sequences: int
    length: int
    tokens: Tensor  # [num_sequences * length] packed position behind each slot; padding repeats some token
    slots: Tensor  # [r] the slots that hold real tokens


@dataclass(frozen=True)
class Bucketed(PackedAttention):
    """SDPA over dense batches of sequences of similar length: what the CPU, fp32, dropout and odd shapes get."""

    buckets: tuple[Bucket, ...]
    restore: Tensor | None  # [m] where each packed token stands in the buckets' real tokens; None: already in order

    @staticmethod
    def of(lengths: list[int]) -> Bucketed:
        """Buckets for sequences of these lengths, laid end to end."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        buckets = []
        for group in _similar(lengths):
            longest = lengths[group[-1]]
            offsets = torch.arange(longest)
            begin = torch.tensor([starts[i] for i in group])
            size = torch.tensor([lengths[i] for i in group])
            tokens = begin[:, None] + torch.minimum(offsets, (size - 1).clamp(min=0)[:, None])
            slots = (offsets < size[:, None]).flatten().nonzero().flatten()
            buckets.append(Bucket(len(group), longest, tokens.flatten(), slots))
        packed = torch.cat([b.tokens[b.slots] for b in buckets]) if buckets else torch.zeros(0, dtype=torch.long)
        in_order = bool((packed == torch.arange(len(packed))).all())
        return Bucketed(tuple(buckets), None if in_order else packed.argsort())

    def to(self, device: torch.device) -> Bucketed:
        return Bucketed(
            tuple(replace(b, tokens=move(b.tokens, device), slots=move(b.slots, device)) for b in self.buckets),
            None if self.restore is None else move(self.restore, device),
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        outputs = []
        for b in self.buckets:

            def rows(x: Tensor, b: Bucket = b) -> Tensor:
                return x.index_select(0, b.tokens).view(b.num_sequences, b.length, *x.shape[1:]).transpose(1, 2)

            out = _dense(rows(q), rows(k), rows(v), spec)  # [b, H, L, D]
            outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, b.slots))
        out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
        return out if self.restore is None else out.index_select(0, self.restore)


def _similar(lengths: list[int]) -> list[list[int]]:
    """Indices grouped by length, each group ascending and little padded when brought to its longest."""
    groups: list[list[int]] = []
    total = 0
    for i in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):  # so that the newest is the longest
        if groups and total + lengths[i] >= (1 - _MAX_PADDING) * lengths[i] * (len(groups[-1]) + 1):
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    return groups


def _dense(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """Causal attention of a dense batch [b, H, L, D] padded on the right."""
    length, window = q.shape[2], spec.window
    kwargs = {"scale": spec.scale, "dropout_p": spec.dropout, "enable_gqa": True}
    if (window is None or window >= length) and not spec.softcap:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, **kwargs)
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if not spec.softcap:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **kwargs)
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * spec.scale
    scores = (spec.softcap * torch.tanh(scores / spec.softcap)).masked_fill(~mask, -torch.inf)
    return F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), spec.dropout) @ v


@torch.compiler.disable  # a compiled block breaks here: layouts differ from one micro-batch to the next
def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedLayout,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query [1, H, m, D], key and value [1, H_kv, m, D] to [1, m, H, D]."""
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which packed attention does not support")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [m, H, D]
    spec = AttentionSpec(
        scale=q.shape[-1] ** -0.5 if scaling is None else scaling,
        # a window that no sequence fills is none
        window=None if sliding_window is None or sliding_window >= packed.max_length else sliding_window,
        softcap=softcap or None,
        dropout=dropout,
    )
    return packed.attention(q, k, v, spec)[None], None


def register_packed_attention() -> None:
    """Makes the function known to transformers under its name; models are built with it."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
