"""What a layer asks of attention over packed rows, the interface behind which the kernels stand, and the one op that
autograd, checkpointing and torch.compile see of them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of causal attention besides its tensors."""

    scale: float
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all of them
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    dropout: float = 0.0  # share of attention weights dropped in training


class PackedAttention(ABC):
    """How the rows of one packed micro-batch attend: each causally to the rows of its own sequence."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        """q [m, H, D], k and v [m, H_kv, D] to [m, H, D]; m rows of this process."""

    @abstractmethod
    def to(self, device: torch.device) -> PackedAttention:
        """The same with its index tensors on `device`."""


def move(x: Tensor, device: torch.device) -> Tensor:
    """To a device without making the host wait: a GPU copies from page-locked memory."""
    return (x.pin_memory() if device.type == "cuda" and not x.is_cuda else x).to(device, non_blocking=True)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which partial results and log-sum-exps of tensors of this type are kept."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Ops take tensors and numbers only, so an attention goes by its number. It is found for as long as its micro-batch
# lives, and nothing is kept alive by this dictionary.
_HANDLES = itertools.count()
_BY_HANDLE: WeakValueDictionary[int, KernelAttention] = WeakValueDictionary()


@dataclass(frozen=True, eq=False)
class KernelAttention(PackedAttention):
    """Attention by kernels that bring their own backward, which needs the output and the log-sum-exp.

    Called as the op `rl2lightning::attend`, so that selective checkpointing can keep its outputs (`keep_attention`).
    """

    handle: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "handle", next(_HANDLES))
        _BY_HANDLE[self.handle] = self

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
        """q [m, H, D], k and v [m, H_kv, D] to the output [m, H, D] and the log-sum-exp [H, m]."""

    @abstractmethod
    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, in their types."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
        assert not spec.dropout, "kernels with a backward of their own do not drop"
        return attend(q, k, v, self.handle, spec.scale, spec.window or 0, spec.softcap or 0.0)[0]


@torch.library.custom_op("rl2lightning::attend", mutates_args=())
def attend(
    q: Tensor, k: Tensor, v: Tensor, handle: int, scale: float, window: int, softcap: float
) -> tuple[Tensor, Tensor]:
    """Output [m, H, D] and log-sum-exp [H, m] by the attention of that handle; window and softcap 0: none."""
    return _BY_HANDLE[handle].forward(q, k, v, AttentionSpec(scale, window or None, softcap or None))


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int, scale: float, window: int, softcap: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=accumulator(q.dtype))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, handle, scale, window, softcap = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.attention = _BY_HANDLE[handle]  # alive until the backward pass
    ctx.spec = AttentionSpec(scale, window or None, softcap or None)


def _backward(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    with torch.no_grad():
        return (*ctx.attention.backward(dout.contiguous(), *ctx.saved_tensors, ctx.spec), None, None, None, None)


attend.register_autograd(_backward, setup_context=_setup_context)


def keep_attention() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """A `context_fn` for torch.utils.checkpoint: keeps the outputs of attention and recomputes the rest of a block.

    At long sequences attention is most of what a block computes, and little of what it remembers. Under ring attention
    it also saves a second round of communication.
    """
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    kept = {
        torch.ops.rl2lightning.attend.default,
        # what scaled_dot_product_attention turns into, for the sequences it is left with
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
