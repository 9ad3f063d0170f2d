"""Advantages on padded episodes [B, T] (actions only, right-padded), and on the returns of groups [S].

Every estimator here is one backward recurrence, y_t = x_t + decay_t y_{t+1}; the value past the last action is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def backward_recurrence(x: Tensor, decay: Tensor) -> Tensor:
    """y_t = x_t + decay_t y_{t+1}, with y = 0 past the end, in log2(T) doublings rather than T steps.

    Args:
        x: [B, T].
        decay: broadcastable to [B, T].

    Returns:
        y: [B, T].
    """
    y, decay = x.clone(), decay.expand_as(x).clone()
    length, step = x.shape[1], 1
    while step < length:  # now y_t covers x_t .. x_{t+step-1}, and decay_t leads from t to t + step
        y[:, :-step] += decay[:, :-step] * y[:, step:]
        decay[:, :-step] *= decay[:, step:].clone()
        step *= 2
    return y


def _next(x: Tensor, steps: int = 1) -> Tensor:
    """x_{t+steps}, 0 past the end."""
    shifted = torch.zeros_like(x)
    if steps < x.shape[1]:
        shifted[:, :-steps] = x[:, steps:]
    return shifted


def _discounted_sum(rewards: Tensor, gamma: float) -> Tensor:
    return backward_recurrence(rewards, rewards.new_tensor(gamma))


def _td_errors(rewards: Tensor, values: Tensor, gamma: float) -> Tensor:
    return rewards + gamma * _next(values) - values


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al., 2016, arXiv:1506.02438).

    Args:
        rewards: [B, T] reward of each action.
        values: [B, T] value of the state each action was taken in.
        mask: [B, T] True on actions, False on the padding to their right.
        gamma: discount per action.
        lam: trace decay; 0 gives the one-step TD error, 1 the return minus the value.

    Returns:
        advantages and returns (advantages + values), each [B, T] and 0 on padding. Not whitened: the caller's choice.
    """
    rewards, values = rewards * mask, values * mask
    advantages = backward_recurrence(_td_errors(rewards, values, gamma), rewards.new_tensor(gamma * lam))
    return advantages, advantages + values


def td_lambda(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """TD(lambda): G_t = r_t + gamma ((1 - lam) V_{t+1} + lam G_{t+1}), advantage G - V (Sutton and Barto, 12.1).

    The same numbers as `gae`, reached through the lambda-return. Arguments and results as there.
    """
    rewards, values = rewards * mask, values * mask
    bootstrapped = rewards + gamma * (1 - lam) * _next(values)
    returns = backward_recurrence(bootstrapped, rewards.new_tensor(gamma * lam))
    return returns - values, returns


def n_step(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, n: int) -> tuple[Tensor, Tensor]:
    """n rewards and the value after them: sum_{k<n} gamma^k r_{t+k} + gamma^n V_{t+n} - V_t.

    From n = T on it is Monte Carlo. Arguments and results as in `gae`.
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1 step")
    rewards, values = rewards * mask, values * mask
    to_end = _discounted_sum(rewards, gamma)
    returns = to_end + gamma**n * _next(values - to_end, n)  # from t + n on, the value stands in for the rewards
    return returns - values, returns


def monte_carlo(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float) -> tuple[Tensor, Tensor]:
    """The discounted return to the end, minus the value. Arguments and results as in `gae`."""
    returns = _discounted_sum(rewards * mask, gamma)
    return returns - values * mask, returns


def vtrace(
    rewards: Tensor,
    values: Tensor,
    log_ratio: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float = 1.0,
    rho_bar: float = 1.0,
    c_bar: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """V-trace (Espeholt et al., 2018, arXiv:1802.01561), the behaviour being the rollout policy.

    Args:
        log_ratio: [B, T] old_logps - rollout_logps.
        rho_bar: cap of the ratio that weighs each TD error: decides which policy's value is learnt.
        c_bar: cap of the ratio that lets later errors through: decides how fast.

    Returns:
        advantages rho_t (r_t + gamma v_{t+1} - V_t) and returns v_t. Other arguments and zeros as in `gae`.
    """
    rewards, values = rewards * mask, values * mask
    ratio = importance_ratio(log_ratio) * mask
    rho, c = ratio.clamp(max=rho_bar), lam * ratio.clamp(max=c_bar)
    returns = values + backward_recurrence(rho * _td_errors(rewards, values, gamma), gamma * c)
    return rho * (rewards + gamma * _next(returns) - values), returns


def retrace(
    rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor, *, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Retrace(lambda) (Munos et al., 2016, arXiv:1606.02647) on state values instead of action values.

    A_t = sum_{k>=t} gamma^(k-t) (prod_{i=t+1..k} lam min(1, u_i)) delta_k: TD errors unweighted, traces cut.
    Arguments as in `vtrace`; returns advantages and advantages + values.
    """
    rewards, values = rewards * mask, values * mask
    trace = lam * importance_ratio(log_ratio).clamp(max=1.0) * mask
    advantages = backward_recurrence(_td_errors(rewards, values, gamma), gamma * _next(trace))
    return advantages, advantages + values


def clipped_is(
    rewards: Tensor, values: Tensor, log_ratio: Tensor, mask: Tensor, *, gamma: float, lam: float, clip: float
) -> tuple[Tensor, Tensor]:
    """GAE times the importance ratio clipped to [1 - clip, 1 + clip]. The returns, the critic's target, stay GAE's."""
    advantages, returns = gae(rewards, values, mask, gamma=gamma, lam=lam)
    return advantages * importance_ratio(log_ratio).clamp(1 - clip, 1 + clip), returns


def importance_ratio(log_ratio: Tensor) -> Tensor:
    """exp, its argument held within +-20: a ratio of e^20 says all there is to say, and infinity times 0 is NaN."""
    return log_ratio.clamp(-20.0, 20.0).exp()


def group_relative(
    returns: Tensor, group_ids: Tensor, *, divide_by_std: bool, unbiased: bool, eps: float = 1e-6
) -> Tensor:
    """(R - mean of the group) / (std of the group + eps), GRPO (arXiv:2402.03300); 0 for a group of one.

    Args:
        returns: [S] return of each trajectory.
        group_ids: [S] long, in any order.
        divide_by_std: False is Dr. GRPO (arXiv:2503.20783).
        unbiased: divide the squares by n - 1 (the default of torch) rather than n.

    Returns:
        [S] advantages.
    """
    group, sizes = _groups(group_ids)
    values = returns.double()  # so that equal rewards differ from their mean by nothing that eps would let through
    deviation = values - _per_group_sum(values, group, sizes)[group] / sizes[group]
    if divide_by_std:
        variance = _per_group_sum(deviation.square(), group, sizes) / (sizes - int(unbiased)).clamp(min=1)
        deviation = deviation / (variance.sqrt()[group] + eps)
    return torch.where(sizes[group] > 1, deviation, 0).to(returns.dtype)


def leave_one_out(returns: Tensor, group_ids: Tensor) -> Tensor:
    """R minus the mean of the others in the group, RLOO (arXiv:2402.14740); 0 for a group of one. [S] to [S]."""
    group, sizes = _groups(group_ids)
    values = returns.double()
    others = (_per_group_sum(values, group, sizes)[group] - values) / (sizes[group] - 1).clamp(min=1)
    return torch.where(sizes[group] > 1, values - others, 0).to(returns.dtype)


def group_sizes(group_ids: Tensor) -> Tensor:
    """[S] long, how many share each one's group."""
    group, sizes = _groups(group_ids)
    return sizes[group]


def has_spread(returns: Tensor, group_ids: Tensor) -> Tensor:
    """[S] bool, whether the returns of one's group differ: without spread a group teaches nothing (DAPO's filter)."""
    group, sizes = _groups(group_ids)
    infinity = torch.full(sizes.shape, torch.inf, dtype=returns.dtype, device=returns.device)
    highest = (-infinity).scatter_reduce(0, group, returns, "amax")
    lowest = infinity.scatter_reduce(0, group, returns, "amin")
    return (highest > lowest)[group]


def _groups(group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """[S] index of each one's group, and [G] sizes."""
    _, group, sizes = group_ids.unique(return_inverse=True, return_counts=True)
    return group, sizes


def _per_group_sum(x: Tensor, group: Tensor, sizes: Tensor) -> Tensor:
    return torch.zeros(len(sizes), dtype=x.dtype, device=x.device).index_add(0, group, x)
