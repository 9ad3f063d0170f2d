"""Masked statistics, and the one normalisation: every loss and every metric is `sum(weights * x)`."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Level = Literal["token", "sequence", "constant"]


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of x where mask is True; what lies off the mask may be anything, NaN included."""
    return torch.where(mask, x, 0).sum(dim=dim)


def masked_mean(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of x where mask is True, 0 where the mask is empty."""
    return masked_sum(x, mask, dim) / mask.sum(dim=dim).clamp(min=1)


def masked_moments(x: Tensor, mask: Tensor, *, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of x over the mask, two scalars.

    Args:
        unbiased: divide the squares by n - 1 rather than n. Fewer than two values have standard deviation 0.
    """
    mean = masked_mean(x, mask)
    squares = masked_sum((x - mean).square(), mask)
    return mean, (squares / (mask.sum() - int(unbiased)).clamp(min=1)).sqrt()


def whiten(x: Tensor, mask: Tensor, *, mean: Tensor, std: Tensor, eps: float = 1e-6) -> Tensor:
    """(x - mean) / std on the mask, 0 off it. The caller, who knows over what to take them, gives the moments."""
    return torch.where(mask, (x - mean) / (std + eps), 0)


def actions_per_sequence(action_mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[N] mask and [N] ids to [num_sequences] long, the number of actions of each sequence."""
    counts = torch.zeros(num_sequences, dtype=torch.long, device=action_mask.device)
    return counts.index_add(0, sequence_ids, action_mask.long())


def sequence_mean(x: Tensor, action_mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Mean of x [N] over the actions of each sequence, [num_sequences]; 0 for a sequence without actions."""
    sums = torch.zeros(num_sequences, dtype=x.dtype, device=x.device)
    sums = sums.index_add(0, sequence_ids, torch.where(action_mask, x, 0))
    return sums / actions_per_sequence(action_mask, sequence_ids, num_sequences).clamp(min=1)


def loss_divisor(action_mask: Tensor, sequence_ids: Tensor, num_sequences: int, *, level: Level) -> Tensor:
    """What `loss_weights` divides by, a scalar to be summed over ranks: actions, or sequences with at least one."""
    if level == "token":
        return action_mask.sum()
    return (actions_per_sequence(action_mask, sequence_ids, num_sequences) > 0).sum()


def loss_weights(
    action_mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    level: Level,
    constant_length: int | None = None,
    divisor: Tensor | None = None,
) -> Tensor:
    """Each token's share of the step's loss, such that loss = sum(weights * x) for unreduced values x [N].

    Args:
        action_mask: [N] bool.
        sequence_ids: [N] long, which sequence each token belongs to.
        level: `token` gives each action 1 / N; `sequence` gives each of a sequence's n_i actions 1 / (n_i S), S being
            the sequences with at least one action; `constant` gives each action 1 / (S L) (Dr. GRPO, arXiv:2503.20783).
        constant_length: L of `constant`, the token budget of a trajectory over all its turns.
        divisor: N or S over all ranks where these tokens are only a part of the step (see `loss_divisor`); None: these
            tokens are the whole step.

    Returns:
        [N] float32, 0 off actions, and 0 everywhere if there are none.
    """
    if level == "constant" and (constant_length is None or constant_length < 1):
        raise ValueError(f"level='constant' needs constant_length, a token budget of at least 1, not {constant_length}")
    local = loss_divisor(action_mask, sequence_ids, num_sequences, level=level)
    share = action_mask.float() / (local if divisor is None else divisor).clamp(min=1)
    if level == "sequence":
        share /= actions_per_sequence(action_mask, sequence_ids, num_sequences).clamp(min=1)[sequence_ids]
    if level == "constant" and constant_length is not None:
        share /= constant_length
    return share
