"""Log-probs and entropy from hidden states, a chunk of tokens at a time: the [n, V] logits never exist.

At 131k tokens and 152k words the logits alone would take 80 GB in fp32. The forward pass keeps one log-normaliser per
token; the backward pass computes each chunk's logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_LOGITS = 2**27  # logits of one chunk when its size is not given: half a GiB in fp32, of which about three live


def token_logps(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
    softcap: float | None = None,
    bias: Tensor | None = None,
    fuse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of each target, and the entropy of its distribution, under softmax(hidden @ weight.T / temperature).

    The matrix products run in the dtype of `hidden`, also under autocast; softmax and log-probs in fp32 (or fp64). The
    gradient of `weight` is summed over chunks in fp32 and rounded once: sums of rounded chunks would bias training.

    Args:
        hidden: [n, H] last hidden states.
        weight: [V, H] of the output layer.
        targets: [n] long.
        temperature: the logits are divided by it.
        chunk_size: tokens at a time; None: as many as keep a chunk's logits near half a GiB.
        entropy: whether to compute it; differentiable like the log-probs.
        softcap: logits become softcap * tanh(logits / softcap) before the temperature (Gemma 2, arXiv:2408.00118).
        bias: [V] of the output layer.
        fuse: compile what runs between the matrix products: nearly twice as fast on a GPU after some seconds at the
            first call.

    Returns:
        logps [n] and entropy [n] in nats (None unless asked for), float32, or float64 from float64.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive to take log-probs; greedy sampling has none")
    if chunk_size is None:
        chunk_size = default_chunk_size(weight.shape[0])
    return _TokenLogps.apply(hidden, weight, bias, targets, temperature, softcap, chunk_size, entropy, fuse)


def default_chunk_size(vocab_size: int) -> int:
    """Tokens whose logits fit the memory budget, a multiple of 128 (a tile of the matrix product) where it can be."""
    size = max(1, _CHUNK_LOGITS // vocab_size)
    return size - size % 128 if size > 128 else size


def _scaled(logits: Tensor, bias: Tensor | None, temperature: float, softcap: float | None) -> Tensor:
    """Logits [c, V] after bias, softcap and temperature, in fp32 or better; overwrites what it is given."""
    logits = logits.to(_softmax_dtype(logits))
    if bias is not None:
        logits += bias
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits if temperature == 1.0 else logits.div_(temperature)


def _chunk_forward(
    logits: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, softcap: float | None, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Log-probs, log-normalisers and entropies [c] of one chunk of raw logits [c, V]."""
    logits = _scaled(logits, bias, temperature, softcap)
    lse = logits.logsumexp(-1)
    logps = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - lse
    if not entropy:
        return logps, lse, None
    # H = lse - sum(p * z)
    return logps, lse, lse - ((logits - lse.unsqueeze(-1)).exp() * logits).sum(-1)


def _chunk_backward(
    raw: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor | None,
    grad_logps: Tensor,
    grad_entropy: Tensor | None,
    temperature: float,
    softcap: float | None,
) -> Tensor:
    """Gradient [c, V] of the raw logits, in their dtype; that of the scaled ones is g_l (1 - p) - g_H p (log p + H)."""
    logits = _scaled(raw, bias, temperature, softcap)
    log_p = logits - lse.unsqueeze(-1)
    if grad_entropy is None or entropy is None:
        grad = log_p.exp_().mul_(-grad_logps.unsqueeze(-1))
    else:
        p, constant = log_p.exp(), grad_logps + grad_entropy * entropy
        grad = log_p.mul_(-grad_entropy.unsqueeze(-1)).sub_(constant.unsqueeze(-1)).mul_(p)
    grad.scatter_add_(-1, targets.unsqueeze(-1), grad_logps.unsqueeze(-1))
    if softcap is not None:  # through tanh: 1 - tanh^2, the logits being softcap * tanh / temperature
        grad *= 1 - (logits * (temperature / softcap)).square()
    return (grad if temperature == 1.0 else grad.div_(temperature)).to(raw.dtype)


@cache
def _fused(f: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function: one pass over a chunk's logits for what takes half a dozen."""
    return torch.compile(f)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        softcap: float | None,
        chunk_size: int,
        entropy: bool,
        fuse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        n, dtype = hidden.shape[0], _softmax_dtype(hidden)
        logps, lse = hidden.new_empty(n, dtype=dtype), hidden.new_empty(n, dtype=dtype)
        entropies = hidden.new_empty(n, dtype=dtype) if entropy else None
        chunk_forward = _fused(_chunk_forward) if fuse else _chunk_forward
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            for part in _chunks(n, chunk_size):
                logits = hidden[part] @ cast.T
                logps[part], lse[part], h = chunk_forward(logits, bias, targets[part], temperature, softcap, entropy)
                if entropies is not None and h is not None:
                    entropies[part] = h
        ctx.save_for_backward(hidden, weight, bias, targets, lse, entropies)
        ctx.temperature, ctx.softcap, ctx.chunk_size, ctx.fuse = temperature, softcap, chunk_size, fuse
        ctx.set_materialize_grads(False)
        return logps, entropies

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=lse.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=lse.dtype) if needs_bias else None
        chunk_backward = _fused(_chunk_backward) if ctx.fuse else _chunk_backward
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            for part in _chunks(hidden.shape[0], ctx.chunk_size):
                grad = chunk_backward(
                    hidden[part] @ cast.T,
                    bias,
                    targets[part],
                    lse[part],
                    entropies[part] if entropies is not None else None,
                    grad_logps[part] if grad_logps is not None else torch.zeros_like(lse[part]),
                    grad_entropy[part] if grad_entropy is not None else None,
                    ctx.temperature,
                    ctx.softcap,
                )
                if grad_hidden is not None:
                    torch.mm(grad, cast, out=grad_hidden[part])
                if grad_weight is not None:
                    _add_product(grad_weight, grad.T, hidden[part])
                if grad_bias is not None:
                    grad_bias += grad.sum(0, dtype=grad_bias.dtype)
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 6,
        )


def _chunks(n: int, size: int) -> Iterator[slice]:
    return (slice(start, start + size) for start in range(0, n, size))


def _softmax_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b without rounding the product to the factors' dtype."""
    if a.dtype != total.dtype and a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # elsewhere a product with a wider result does not exist
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
