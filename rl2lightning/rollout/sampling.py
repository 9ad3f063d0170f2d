"""Drawing tokens without generators: the draw is a function of the row's seed and position, whoever else is there."""

from __future__ import annotations

import torch
from torch import Tensor

# splitmix64 (Steele et al., 2014) with its constants as signed 64-bit integers, which wrap as the unsigned ones do
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_MIX1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX2 = 0x94D049BB133111EB - (1 << 64)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own drags the sign in."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniforms(seeds: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1 - 2**-52], one per (seed, position).

    Args:
        seeds: [R] long.
        positions: [R] long, place in the sequence of the token to be drawn, so that a request that is cut off and
            resubmitted with its tokens as prompt goes on as if nothing had happened.

    Returns:
        [R] float64.
    """
    bits = _mix(_mix(seeds) + (positions + 1) * _GOLDEN)
    return _shift(bits, 12).double() * 2.0**-52


def processed_logps(
    logits: Tensor, temperature: Tensor, *, top_p: Tensor | None, top_k: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """Log-probs of the distribution that is sampled from.

    min_p, then top_k, then top_p on what these leave, then renormalised: the order of vLLM, and of Hugging Face for
    each alone.

    Args:
        logits: [R, V].
        temperature: [R]; 0 (greedy) counts as 1.
        top_p: [R] or None for no truncation by any of the three.
        top_k: [R] long, 0 keeps all.
        min_p: [R].

    Returns:
        [R, V] float32, -inf where nothing is ever drawn.
    """
    x = logits.float() / torch.where(temperature == 0, 1.0, temperature)[:, None]
    if top_p is None or top_k is None or min_p is None:
        return x.log_softmax(-1)
    probs = x.softmax(-1)
    x = x.masked_fill(probs < min_p[:, None] * probs.amax(-1, keepdim=True), -torch.inf)
    ascending, order = x.sort(-1)
    vocabulary = x.shape[-1]
    kth = vocabulary - torch.where(top_k > 0, top_k, vocabulary).clamp(max=vocabulary)
    # ties of the k-th stay, as in both of the above
    ascending = ascending.masked_fill(ascending < ascending.gather(-1, kth[:, None]), -torch.inf)
    tail = ascending.softmax(-1, dtype=torch.float64).cumsum(-1) <= 1 - top_p.double()[:, None]
    tail[:, -1] = False  # the likeliest always stays
    tail &= (top_p < 1)[:, None]  # rounding must not cut where nothing was asked for
    ascending = ascending.masked_fill(tail, -torch.inf)
    return torch.empty_like(x).scatter_(-1, order, ascending).log_softmax(-1)


def draw(logps: Tensor, u: Tensor) -> Tensor:
    """Tokens by inverse CDF: the first whose cumulative probability exceeds u times the total.

    A token of probability 0 has an empty interval, and u < 1 stays a whole rounding step below the total, so it is
    never drawn.

    Args:
        logps: [R, V].
        u: [R] float64 of `uniforms`.

    Returns:
        [R] long.
    """
    cdf = logps.exp().cumsum(-1, dtype=torch.float64)
    token = torch.searchsorted(cdf, u[:, None] * cdf[:, -1:], right=True)[:, 0]
    return token.clamp(max=logps.shape[-1] - 1)  # only NaNs get there; the caller finds them in the log-prob
