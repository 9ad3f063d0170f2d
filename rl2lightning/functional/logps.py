"""Log-probs and entropy from hidden states, a chunk of tokens at a time: the [n, V] logits never exist.

At 131k tokens and 152k words the logits alone would take 80 GB in fp32. The forward pass keeps one log-normaliser per
token; the backward pass computes each chunk's logits again. Where the vocabulary is cut over processes (`VocabShard`),
each works through all chunks on its own words, and one collective at the end combines what they found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Shard

_CHUNK_LOGITS = 2**27  # logits of one chunk when its size is not given: half a GiB in fp32, of which about three live


@dataclass(frozen=True)
class VocabShard:
    """The words `offset`, `offset + 1`, … that a process has the output layer's rows of; its group has them all."""

    offset: int
    group: dist.ProcessGroup

    @staticmethod
    def of(weight: DTensor) -> VocabShard:
        """That of an output layer [V, H] cut by words over a mesh of one axis, evenly or not."""
        mesh = weight.device_mesh
        assert mesh.ndim == 1 and weight.placements == (Shard(0),), weight.placements
        per_process = -(-weight.shape[0] // mesh.size())  # the last processes may have fewer
        return VocabShard(per_process * mesh.get_local_rank(), mesh.get_group())

    def locate(self, targets: Tensor, num_words: int) -> tuple[Tensor, Tensor]:
        """Where each target stands among the `num_words` of this process, and whether it is one of them."""
        index = targets - self.offset
        return index.clamp(0, num_words - 1), (index >= 0) & (index < num_words)

    def gather(self, x: Tensor) -> Tensor:
        """[...] of each of r processes to [r, ...]."""
        out = x.new_empty(self.group.size(), *x.shape)
        dist.all_gather_into_tensor(out.flatten(0, 1), x.contiguous(), group=self.group)
        return out

    def add_up(self, x: Tensor) -> None:
        """The sum over the processes, in place."""
        dist.all_reduce(x, group=self.group)


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
    shard: VocabShard | None = None,
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
        shard: which words `weight` and `bias` are of, where they are not all of them; every process of its group calls
            with the same hidden states and targets, gets the same outputs, and must give them the same gradients.

    Returns:
        logps [n] and entropy [n] in nats (None unless asked for), float32, or float64 from float64.
    """
    if temperature <= 0:
        raise ValueError(f"temperature={temperature} must be positive to take log-probs; greedy sampling has none")
    if chunk_size is None:
        chunk_size = default_chunk_size(weight.shape[0])
    return _TokenLogps.apply(hidden, weight, bias, targets, temperature, softcap, chunk_size, entropy, fuse, shard)


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
    logits: Tensor,
    bias: Tensor | None,
    index: Tensor,
    present: Tensor | None,
    temperature: float,
    softcap: float | None,
    entropy: bool,
) -> Tensor:
    """Of a chunk's raw logits [c, V]: log-normaliser, target's logit (0 where absent) and, if asked for, entropy.

    Returns:
        [2 or 3, c].
    """
    logits = _scaled(logits, bias, temperature, softcap)
    lse = logits.logsumexp(-1)
    chosen = logits.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    if present is not None:
        chosen = chosen * present
    if not entropy:
        return torch.stack([lse, chosen])
    log_p = logits - lse.unsqueeze(-1)
    return torch.stack([lse, chosen, -(log_p.exp() * log_p).sum(-1)])


def _chunk_backward(
    raw: Tensor,
    bias: Tensor | None,
    index: Tensor,
    present: Tensor | None,
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
    of_target = grad_logps if present is None else grad_logps * present
    grad.scatter_add_(-1, index.unsqueeze(-1), of_target.unsqueeze(-1))
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
        shard: VocabShard | None,
    ) -> tuple[Tensor, Tensor | None]:
        n = hidden.shape[0]
        index, present = (targets, None) if shard is None else shard.locate(targets, weight.shape[0])
        found = hidden.new_empty(3 if entropy else 2, n, dtype=_softmax_dtype(hidden))
        chunk_forward = _fused(_chunk_forward) if fuse else _chunk_forward
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(hidden.dtype)
            for part in _chunks(n, chunk_size):
                here = None if present is None else present[part]
                found[:, part] = chunk_forward(
                    hidden[part] @ cast.T, bias, index[part], here, temperature, softcap, entropy
                )
        if shard is not None and n:
            found = _combine(shard.gather(found))
        lse, chosen = found[0], found[1]
        entropies = found[2] if entropy else None
        ctx.save_for_backward(hidden, weight, bias, index, present, lse, entropies)
        ctx.temperature, ctx.softcap, ctx.chunk_size, ctx.fuse, ctx.shard = (
            temperature,
            softcap,
            chunk_size,
            fuse,
            shard,
        )
        ctx.set_materialize_grads(False)
        return chosen - lse, entropies

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any, grad_logps: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, index, present, lse, entropies = ctx.saved_tensors
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
                    index[part],
                    None if present is None else present[part],
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
        if grad_hidden is not None and ctx.shard is not None and hidden.shape[0]:
            ctx.shard.add_up(grad_hidden)  # each process knows what its own words ask of the hidden states
        return (
            grad_hidden,
            grad_weight.to(weight.dtype) if grad_weight is not None else None,
            grad_bias.to(bias.dtype) if grad_bias is not None else None,
            *(None,) * 7,
        )


def _combine(parts: Tensor) -> Tensor:
    """What each of r processes found on its own words, [r, 2 or 3, n], as that of all words, [2 or 3, n]."""
    lse = parts[:, 0].logsumexp(0)
    combined = [lse, parts[:, 1].sum(0)]
    if parts.shape[1] == 3:  # of the choice of a process, and expected of the choice among its words
        log_share = parts[:, 0] - lse
        combined.append((log_share.exp() * (parts[:, 2] - log_share)).sum(0))
    return torch.stack(combined)


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
