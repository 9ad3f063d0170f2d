"""The kernels behind block attention, and which of them serves: by hardware, shape and what is installed."""

from __future__ import annotations

import functools
from typing import Any, get_args

import torch
from torch import Tensor

from rl2lightning.models.attention import AttentionSpec
from rl2lightning.models.blocks import (
    BackendName,
    BlockBackend,
    Demand,
    Forward,
    Gradients,
    Segments,
    import_error,
    installed,
)
from rl2lightning.models.blocks_math import Math

_LONG = 4096  # cuDNN builds a plan for every new shape, which long segments alone are worth


def _flash_refusal(demand: Demand, *, capability: int) -> str | None:
    """What all flash kernels ask for."""
    if demand.device.type != "cuda" or demand.capability[0] < capability:
        found = "no GPU" if demand.device.type != "cuda" else "one of {}.{}".format(*demand.capability)
        return f"it needs a GPU of compute capability {capability}.0 or newer, and this is {found}"
    if demand.dtype not in (torch.float16, torch.bfloat16):
        return f"it computes in bf16 or fp16, not in {demand.dtype}: set trainer.precision to bf16-mixed"
    if demand.head_size % 8 or demand.head_size > 256:
        return f"the head size {demand.head_size} is no multiple of 8 up to 256"
    return None


def _broken(name: str, module: str) -> str | None:
    """Why a backend's installed package is of no use; said once, or a slower one would serve in silence.

    flash-attn and flash-attn-4 both bring `flash_attn/cute`: the one installed last has it.
    """
    if (error := import_error(module)) is None:
        return None
    announce(f"attention backend {name} is installed and not used: {error}")
    return error


def _window_sizes(spec: AttentionSpec, causal: bool, unbounded: int | None) -> tuple[int | None, int | None]:
    """How far a query sees to its left and right, as flash kernels count it."""
    return unbounded if spec.window is None else spec.window - 1, 0 if causal else unbounded


def _finite_or_none(lse: Tensor) -> Tensor:
    """Flash kernels say +inf of queries without keys; their log-sum-exp is -inf."""
    return lse.masked_fill(lse == torch.inf, -torch.inf)


class FA4(BlockBackend):
    """FlashAttention-4 (`flash-attn-4`): the fastest on Hopper and Blackwell, compiled when first called."""

    name = "fa4"

    def refusal(self, demand: Demand) -> str | None:
        if not installed("flash-attn-4"):
            return "the package flash-attn-4 is not installed (pip install 'rl2lightning[fa4]')"
        if demand.capability[0] >= 10 and demand.head_size > 128 and demand.head_size != 256:
            return f"on this GPU it has no kernel for the head size {demand.head_size}"
        return _flash_refusal(demand, capability=9) or _broken(self.name, "flash_attn.cute.interface")

    @staticmethod
    def _settings(cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec) -> dict[str, Any]:
        left, right = _window_sizes(spec, causal, None)
        return {
            "cu_seqlens_q": cu_q.cu, "cu_seqlens_k": cu_k.cu,
            "max_seqlen_q": cu_q.longest, "max_seqlen_k": cu_k.longest,
            "softmax_scale": spec.scale, "causal": causal, "softcap": spec.softcap or 0.0,
            "window_size_left": left, "window_size_right": right,
        }  # fmt: skip

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec
    ) -> Forward:
        from flash_attn.cute.interface import _flash_attn_fwd

        out, lse, *_ = _flash_attn_fwd(q, k, v, return_lse=True, **self._settings(cu_q, cu_k, causal, spec))
        return out, lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec,
    ) -> Gradients:  # fmt: skip
        from flash_attn.cute.interface import _flash_attn_bwd

        dq, dk, dv, *_ = _flash_attn_bwd(q, k, v, out, dout, lse, **self._settings(cu_q, cu_k, causal, spec))
        return dq, dk, dv


class CuDNN(BlockBackend):
    """cuDNN's kernels, which come with torch: near FlashAttention-4 on Hopper; one call per segment."""

    name = "cudnn"

    def refusal(self, demand: Demand) -> str | None:
        if demand.window is not None or demand.softcap is not None:
            return "it has neither windows nor soft-capping"
        if not demand.square:
            return "its causal blocks are square, those of the gather transport are not: choose transport='ring'"
        if demand.head_size > 128:
            return f"its heads have at most 128 channels, not {demand.head_size}"
        return _flash_refusal(demand, capability=8)

    def prefers(self, demand: Demand) -> bool:
        return demand.capability[0] >= 9 and demand.mean_length >= _LONG

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec
    ) -> Forward:
        parts = []
        for (a, b), (c, d) in zip(cu_q.spans, cu_k.spans, strict=True):
            assert not causal or b - a == d - c, "cuDNN aligns causal blocks to the top left corner"
            if b - a == d - c == 1:  # which it refuses
                one = Segments.of([1])
                parts.append(Math().forward(q[a:b], k[c:d], v[c:d], one, one, causal, spec))
                continue
            out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
                _dense(q[a:b]), _dense(k[c:d]), _dense(v[c:d]), None, True, 0.0, causal, False, scale=spec.scale
            )
            parts.append((out[0].transpose(0, 1), lse.reshape(q.shape[1], b - a)))
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out.to(q.dtype) for out, _ in parts]), torch.cat([lse for _, lse in parts], 1)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec,
    ) -> Gradients:  # fmt: skip
        parts = []
        unused = torch.zeros((), dtype=torch.int64, device=q.device)
        for (a, b), (c, d) in zip(cu_q.spans, cu_k.spans, strict=True):
            if b - a == d - c == 1:
                one = Segments.of([1])
                some = (dout[a:b], q[a:b], k[c:d], v[c:d], out[a:b], lse[:, a:b])
                parts.append(Math().backward(*some, one, one, causal, spec))
                continue
            stats = lse[:, a:b].contiguous()[None]
            grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                _dense(dout[a:b]), _dense(q[a:b]), _dense(k[c:d]), _dense(v[c:d]), _dense(out[a:b]),
                stats[..., None] if _cudnn_stats_ndim(q.device) == 4 else stats,
                unused, unused, None, None, None, b - a, d - c, 0.0, causal, scale=spec.scale,
            )  # fmt: skip
            parts.append(tuple(g[0].transpose(0, 1) for g in grads))
        if len(parts) == 1:
            return parts[0]
        dq, dk, dv = (torch.cat([g.to(q.dtype) for g in grads]) for grads in zip(*parts, strict=True))
        return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """[m, H, D] as a batch of one, [1, H, m, D]."""
    return x.transpose(0, 1)[None]


@functools.cache
def _cudnn_stats_ndim(device: torch.device) -> int:
    """cuDNN's log-sum-exp is [B, H, n, 1] in some versions of torch and [B, H, n] in others; its backward wants it back
    as it was."""
    x = torch.zeros(1, 1, 64, 64, dtype=torch.bfloat16, device=device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention(x, x, x, None, True, 0.0, True, False)[1].dim()


class FlashAttention(BlockBackend):
    """FlashAttention-2 (`flash-attn`), which has windows and soft-capping."""

    name = "flash_attn"

    def refusal(self, demand: Demand) -> str | None:
        if not installed("flash-attn"):
            return "the package flash-attn is not installed (pip install 'rl2lightning[flash-attn]')"
        return _flash_refusal(demand, capability=8) or _broken(self.name, "flash_attn.flash_attn_interface")

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec
    ) -> Forward:
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

        left, right = _window_sizes(spec, causal, -1)
        out, lse, *_ = _flash_attn_varlen_forward(
            q, k, v, cu_q.cu, cu_k.cu, _at_least_two(cu_q), cu_k.longest, 0.0, spec.scale, causal,
            window_size_left=left, window_size_right=right, softcap=spec.softcap or 0.0,
        )  # fmt: skip
        return out, _finite_or_none(lse)

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec,
    ) -> Gradients:  # fmt: skip
        from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

        left, right = _window_sizes(spec, causal, -1)
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        _flash_attn_varlen_backward(
            dout, q, k, v, out, lse.contiguous(), dq, dk, dv, cu_q.cu, cu_k.cu, _at_least_two(cu_q), cu_k.longest, 0.0,
            spec.scale, causal, left, right, spec.softcap or 0.0, None, False,
        )  # fmt: skip
        return dq, dk, dv


def _at_least_two(cu_q: Segments) -> int:
    """With a longest query of one, FlashAttention-2 swaps heads and queries and returns another log-sum-exp."""
    return max(cu_q.longest, 2)


class Aten(BlockBackend):
    """The FlashAttention-2 inside torch: needs no package, has no soft-capping."""

    name = "aten"

    def refusal(self, demand: Demand) -> str | None:
        if demand.softcap is not None:
            return f"it has no soft-capping, and the model's is {demand.softcap}"
        return _flash_refusal(demand, capability=8)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec
    ) -> Forward:
        left, right = _window_sizes(spec, causal, -1)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu_q.cu, cu_k.cu, _at_least_two(cu_q), cu_k.longest, 0.0, causal, False,
            scale=spec.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip
        return out, _finite_or_none(lse.reshape(q.shape[1], -1))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cu_q: Segments, cu_k: Segments, causal: bool, spec: AttentionSpec,
    ) -> Gradients:  # fmt: skip
        left, right = _window_sizes(spec, causal, -1)
        no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
        return torch.ops.aten._flash_attention_backward(
            dout, q, k, v, out, lse.contiguous(), cu_q.cu, cu_k.cu, _at_least_two(cu_q), cu_k.longest, 0.0, causal,
            no_dropout, torch.empty(0, device=q.device),
            scale=spec.scale, window_size_left=left, window_size_right=right,
        )  # fmt: skip


# in the order of preference
BACKENDS: tuple[BlockBackend, ...] = (FA4(), CuDNN(), FlashAttention(), Aten(), Math())
assert {b.name for b in BACKENDS} == set(get_args(BackendName)) - {"auto"}


def choose_backend(name: BackendName, demand: Demand) -> BlockBackend:
    """The backend of that name, or (auto) the first that can serve and suits.

    Raises:
        ValueError: where the one asked for by name cannot serve.
    """
    if name == "auto":
        return next(b for b in BACKENDS if b.prefers(demand) and b.refusal(demand) is None)
    chosen = next(b for b in BACKENDS if b.name == name)
    if (reason := chosen.refusal(demand)) is not None:
        able = [b for b in BACKENDS if b.refusal(demand) is None]
        raise ValueError(
            f"attention backend '{name}' cannot be used here: {reason}; "
            f"or set RingAttention.backend to 'auto' or one of {[b.name for b in able]}"
        )
    return chosen


@functools.cache
def announce(message: str) -> None:
    """Tells it to the log once."""
    from lightning.pytorch.utilities import rank_zero_info

    rank_zero_info(message)
