"""`RingAttention`: the plugin that decides how attention is computed and spreads sequences over the context axis."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from rl2lightning.models.blocks import BackendName
from rl2lightning.models.packed import Pack, layout_of, pack, with_layout
from rl2lightning.models.policy import PackedModel
from rl2lightning.parallel.ring.attention import RingedAttention, TransportName
from rl2lightning.parallel.ring.layout import zigzag
from rl2lightning.parallel.ring.transports import Package
from rl2lightning.types import Sequences

_LONGEST_DECIDES = {"dynamic", "longrope"}  # rotary embeddings that look at the longest position at hand
_CAUSAL_LAYERS = {"full_attention", "sliding_attention", "attention"}  # what transformers calls those we can spread


class RingAttention(LayerSync):
    """How packed sequences attend, for `trainer.plugins`; alone on the context axis it only chooses the kernels.

    Args:
        transport: how keys reach the processes that share a sequence. "ring": from neighbour to neighbour, while those
            at hand are attended to. "gather": all of them collected, some heads at a time; rounds as one process does.
            "package": ring-flash-attn's function. "auto": the ring, but gather where a layer has a sliding window or
            shards are short. Layers with a window use gather whatever is said here.
        backend: the attention kernels; "auto" takes the fastest that is installed and can serve, and logs which.
        split_from: sequences of at least so many tokens are cut over the context axis (0: all), shorter ones stay whole
            on one process. None: only as many of the longest are cut as an even load needs, because a whole sequence
            needs no communication and runs in one large kernel.
        gather_heads: key heads that "gather" collects at a time; None: a quarter of them, so that three quarters of
            the traffic hide behind the kernels.
    """

    def __init__(
        self,
        transport: TransportName = "auto",
        backend: BackendName = "auto",
        split_from: int | None = None,
        gather_heads: int | None = None,
    ) -> None:
        if split_from is not None and split_from < 0:
            raise ValueError(f"RingAttention.split_from={split_from} must not be negative (0 cuts every sequence)")
        if gather_heads is not None and gather_heads < 1:
            raise ValueError(f"RingAttention.gather_heads={gather_heads} must be at least 1")
        self.transport: TransportName = transport
        self.backend: BackendName = backend
        self.split_from = split_from
        self.gather_heads = gather_heads
        self.row_multiple = 1  # of each process's rows; the strategy's, whose tensor axis may share them out again
        self._packs: dict[PackedModel, Pack] = {}  # what models had before

    def apply(self, model: nn.Module) -> nn.Module:
        """Gives every packed model inside the LightningModule this plugin's way of packing a micro-batch."""
        assert isinstance(model, LightningModule)
        if self.transport == "package":
            Package.refuse_if_missing()
        mesh = model.device_mesh
        group = mesh["context"].get_group() if mesh is not None and mesh["context"].size() > 1 else None
        for inner in model.modules():
            if isinstance(inner, PackedModel) and inner not in self._packs:
                if group is not None:
                    refuse_what_cannot_be_spread(inner.lm.config, recurrent=inner.lm._is_stateful)
                warn_of_embeddings_that_look_at_others(inner.lm.config)
                self._packs[inner] = inner.pack
                inner.pack = partial(self._spread, group=group) if group is not None else self._whole
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        """Gives them back what they had."""
        for inner, before in self._packs.items():
            inner.pack = before
        self._packs.clear()
        return model

    def _whole(self, seqs: Sequences, device: torch.device, dtype: torch.dtype) -> Sequences:
        return pack(seqs, device, dtype, backend=self.backend, row_multiple=self.row_multiple)

    def _spread(self, seqs: Sequences, device: torch.device, dtype: torch.dtype, group: ProcessGroup) -> Sequences:
        """The micro-batch with the layout of this process's share of it."""
        if seqs.layout is not None:
            return seqs
        size = dist.get_world_size(group)
        layout = zigzag(seqs.lengths.tolist(), size, split_from=self.split_from, row_multiple=self.row_multiple)
        attention = RingedAttention.of(
            layout, group, transport=self.transport, backend=self.backend, gather_heads=self.gather_heads
        )
        tokens, position_ids = layout.rows(dist.get_rank(group))
        rows = layout_of(seqs, attention, tokens=tokens, position_ids=position_ids, join=partial(sum_over, group=group))
        return with_layout(seqs, rows, device)


def sum_over(x: Tensor, group: ProcessGroup) -> Tensor:
    """Sum of x over a group of processes. All compute the same loss of it, and keep the gradient of their summand."""
    return _Sum.apply(x, group)  # type: ignore[return-value]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dout, None


def refuse_what_cannot_be_spread(config: Any, *, recurrent: bool) -> None:
    """Raises where rows on different processes would not compute what they compute together.

    Args:
        config: a Hugging Face model's.
        recurrent: whether transformers marks the model as one with a state that goes from token to token.
    """
    config = config.get_text_config()
    remedy = "set strategy.context to 1"
    name = f"model type '{config.model_type}'"
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if odd := sorted(kinds - _CAUSAL_LAYERS):
        raise ValueError(f"{name} has layers of the kind {odd}, which cannot be spread over a context axis; {remedy}")
    if recurrent:
        raise ValueError(f"{name} is recurrent, and its tokens cannot be spread over a context axis; {remedy}")
    if (ropes := _rope_types(getattr(config, "rope_parameters", None))) & _LONGEST_DECIDES:
        raise ValueError(
            f"{name} has rotary embeddings of type {sorted(ropes)}, which depend on the longest position at hand, "
            f"and that differs between processes; {remedy} or config.rope_parameters.rope_type to another"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise ValueError(
            f"{name} has attention_dropout={config.attention_dropout}, which ring attention does not support; "
            f"set it to 0 in config.json, or {remedy}"
        )


def warn_of_embeddings_that_look_at_others(config: Any) -> None:
    """Says so where the longest sequence of a micro-batch changes what is computed of the others."""
    config = config.get_text_config()
    if ropes := _rope_types(getattr(config, "rope_parameters", None)) & _LONGEST_DECIDES:
        limit = (config.rope_parameters or {}).get("original_max_position_embeddings", "the model's original length")
        rank_zero_warn(
            f"model type '{config.model_type}' has rotary embeddings of type {sorted(ropes)}: in a micro-batch with a "
            f"sequence longer than {limit} tokens, all others are embedded like that one"
        )


def _rope_types(parameters: Any) -> set[str]:
    """The types named in rope_parameters, which may hold one set of them per kind of layer."""
    if not isinstance(parameters, dict):
        return set()
    nested = (_rope_types(x) for x in parameters.values())
    return {parameters.get("rope_type", "default")}.union(*nested)
