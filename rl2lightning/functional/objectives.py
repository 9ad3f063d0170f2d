"""Several objectives at once. Everything is maximised; S samples (or checkpoints), K objectives."""

from __future__ import annotations

import torch
from torch import Tensor

from rl2lightning.functional.advantages import group_relative


def weighted_sum(rewards: Tensor, weights: Tensor) -> Tensor:
    """[S, K] rewards and [K] weights to [S]."""
    return rewards @ weights


def chebyshev(rewards: Tensor, weights: Tensor, ideal: Tensor) -> Tensor:
    """Minus the worst weighted gap to an ideal point: -max_k w_k (ideal_k - r_k).

    Unlike a weighted sum it also reaches the parts of a front that bulge inwards.

    Args:
        rewards: [S, K].
        weights: [K], not negative.
        ideal: [K].

    Returns:
        [S], at most 0 as long as no reward passes the ideal.
    """
    return -(weights * (ideal - rewards)).amax(-1)


def group_normalised_sum(
    rewards: Tensor, weights: Tensor, group_ids: Tensor, *, divide_by_std: bool = True, unbiased: bool = True
) -> Tensor:
    """GDPO (arXiv:2601.05242): normalise every reward within its group, then sum with the weights.

    A reward of small spread then counts as much as one of large spread. The paper whitens the sum over the batch once
    more; here that is left to the advantage estimator.

    Args:
        rewards: [S, K].
        weights: [K].
        group_ids: [S].

    Returns:
        [S].
    """
    columns = [
        group_relative(column, group_ids, divide_by_std=divide_by_std, unbiased=unbiased)
        for column in rewards.unbind(-1)
    ]
    return weighted_sum(torch.stack(columns, -1), weights)


def dominates(a: Tensor, b: Tensor) -> Tensor:
    """Whether a is no worse than b in every objective and better in one: [..., K] against [..., K] to [...] bool."""
    return (a >= b).all(-1) & (a > b).any(-1)


def pareto_front(points: Tensor) -> Tensor:
    """[M, K] to [M] bool, True on the points that no other dominates; of equal points all or none are."""
    return ~dominates(points.unsqueeze(0), points.unsqueeze(1)).any(1)


def hypervolume(points: Tensor, reference: Tensor) -> Tensor:
    """Volume of what the points dominate above the reference point, exactly.

    Sliced along the last objective: each slab's thickness times the volume of the points that reach it. Meant for
    archives of about a hundred points and up to four objectives; the work grows as M^(K - 1).

    Args:
        points: [M, K]; those not above the reference in every objective add nothing.
        reference: [K].

    Returns:
        a scalar.
    """
    above = (points - reference)[(points > reference).all(-1)]
    if len(above) == 0:
        return points.new_zeros(())
    order = above[:, -1].argsort(descending=True)
    above = above[order]
    thickness = above[:, -1] - torch.cat([above[1:, -1], above.new_zeros(1)])
    if above.shape[1] == 1:
        return thickness.sum()
    if above.shape[1] == 2:
        return (thickness * above[:, 0].cummax(0).values).sum()
    origin = torch.zeros_like(reference[:-1])
    slabs = [thickness[i] * hypervolume(above[: i + 1, :-1], origin) for i in range(len(above)) if thickness[i] > 0]
    return torch.stack(slabs).sum()
