"""Packed attention: sequences of one flat row attend causally to themselves alone, on a GPU kernel or through SDPA."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl2lightning.types import Sequences

PACKED_ATTENTION = "rl2lightning_packed"  # the name under which transformers finds it; must not contain "flash"
_MAX_PADDING = 0.25  # share of padding at which a bucket of the SDPA path is closed


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, run as one dense batch padded on the right, where a causal mask already hides it."""

    num_sequences: int
    length: int
    tokens: Tensor  # [num_sequences * length] packed position behind each slot; padding repeats some token
    slots: Tensor  # [m] the slots that hold real tokens


@dataclass(frozen=True)
class PackedLayout:
    """What attention and head need to know of a packed row, worked out on the host once per micro-batch."""

    position_ids: Tensor  # [n]
    cu_seqlens: Tensor  # [B + 1] int32
    max_length: int
    actions: Tensor  # [a] positions of the tokens to score
    buckets: tuple[Bucket, ...]  # empty where a variable-length kernel takes the packed row as it is
    restore: Tensor | None  # [n] where each packed token stands in the buckets' real tokens; None: already in order

    def to(self, device: torch.device) -> PackedLayout:
        def move(x: Tensor) -> Tensor:
            return (x.pin_memory() if device.type == "cuda" and not x.is_cuda else x).to(device, non_blocking=True)

        return PackedLayout(
            move(self.position_ids),
            move(self.cu_seqlens),
            self.max_length,
            move(self.actions),
            tuple(replace(b, tokens=move(b.tokens), slots=move(b.slots)) for b in self.buckets),
            None if self.restore is None else move(self.restore),
        )


def uses_varlen_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch's variable-length flash attention takes these tensors; otherwise SDPA runs bucket by bucket."""
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def pack(seqs: Sequences, device: torch.device, dtype: torch.dtype) -> Sequences:
    """The micro-batch on `device` with its `layout`; `dtype` is the compute type, which decides the kernel."""
    if seqs.layout is not None:
        return seqs
    lengths = seqs.lengths.tolist()
    buckets, restore = ((), None) if uses_varlen_kernel(device, dtype) else _bucket(lengths)
    layout = PackedLayout(
        position_ids=seqs.position_ids,
        cu_seqlens=seqs.cu_seqlens,
        max_length=max(lengths, default=0),
        actions=seqs.action_mask.nonzero().flatten(),
        buckets=buckets,
        restore=restore,
    )
    if device.type == "cuda":
        seqs = seqs.pin_memory()
    return seqs.to(device, non_blocking=True).replace(layout=layout.to(device))


def _bucket(lengths: list[int]) -> tuple[tuple[Bucket, ...], Tensor | None]:
    order = sorted(range(len(lengths)), key=lambda i: (lengths[i], i))
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    groups: list[list[int]] = []
    total = 0
    for i in order:  # ascending, so that the newest is the longest
        if groups and total + lengths[i] >= (1 - _MAX_PADDING) * lengths[i] * (len(groups[-1]) + 1):
            groups[-1].append(i)
            total += lengths[i]
        else:
            groups.append([i])
            total = lengths[i]
    buckets = []
    for group in groups:
        longest = lengths[group[-1]]
        offsets = torch.arange(longest)
        begin = torch.tensor([starts[i] for i in group])
        size = torch.tensor([lengths[i] for i in group])
        tokens = begin[:, None] + torch.minimum(offsets, (size - 1).clamp(min=0)[:, None])
        slots = (offsets < size[:, None]).flatten().nonzero().flatten()
        buckets.append(Bucket(len(group), longest, tokens.flatten(), slots))
    packed = torch.cat([b.tokens[b.slots] for b in buckets]) if buckets else torch.zeros(0, dtype=torch.long)
    in_order = bool((packed == torch.arange(len(packed))).all())
    return tuple(buckets), None if in_order else packed.argsort()


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
    """transformers' attention function: query [1, H, n, D], key and value [1, H_kv, n, D] to [1, n, H, D]."""
    if kwargs.get("s_aux") is not None:
        raise ValueError(f"{type(module).__name__} has attention sinks, which packed attention does not support")
    q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [n, H, D]
    if not packed.buckets:
        if dropout or softcap:
            raise ValueError(f"attention dropout ({dropout}) and soft-capping ({softcap}) need precision 32-true")
        return _varlen(q, k, v, packed, scaling, sliding_window)[None], None
    outputs = []
    for b in packed.buckets:

        def rows(x: Tensor, b: Bucket = b) -> Tensor:
            return x.index_select(0, b.tokens).view(b.num_sequences, b.length, *x.shape[1:]).transpose(1, 2)

        out = _dense(rows(q), rows(k), rows(v), scaling, dropout, sliding_window, softcap)  # [b, H, L, D]
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, b.slots))
    out = torch.cat(outputs) if len(outputs) > 1 else outputs[0]
    return (out if packed.restore is None else out.index_select(0, packed.restore))[None], None


def _varlen(q: Tensor, k: Tensor, v: Tensor, packed: PackedLayout, scaling: float | None, window: int | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    from rl2lightning.compat import varlen_gqa_kwargs

    cu, longest = packed.cu_seqlens, packed.max_length
    left = -1 if window is None else window - 1
    return varlen_attn(q, k, v, cu, cu, longest, longest, scale=scaling, window_size=(left, 0), **varlen_gqa_kwargs())  # type: ignore[return-value]


def _dense(
    q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None, softcap: float | None
) -> Tensor:
    """Causal attention of a dense batch [b, H, L, D] padded on the right."""
    length = q.shape[2]
    windowed = window is not None and window < length
    if not windowed and not softcap:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    distance = torch.arange(length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    mask = distance >= 0 if window is None else (distance >= 0) & (distance < window)
    if not softcap:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scaling, dropout_p=dropout, enable_gqa=True
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (scaling if scaling is not None else q.shape[-1] ** -0.5)
    scores = (softcap * torch.tanh(scores / softcap)).masked_fill(~mask, -torch.inf)
    return F.dropout(scores.softmax(-1, dtype=torch.float32).to(q.dtype), dropout) @ v


def register_packed_attention() -> None:
    """Makes the function known to transformers under its name; models are built with it."""
    from transformers import AttentionInterface

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
