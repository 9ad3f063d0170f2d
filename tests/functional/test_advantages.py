import pytest
import torch

from rl2lightning.functional.advantages import (
    backward_recurrence,
    clipped_is,
    gae,
    group_relative,
    has_spread,
    importance_ratio,
    leave_one_out,
    monte_carlo,
    n_step,
    retrace,
    td_lambda,
    vtrace,
)

torch_close = torch.testing.assert_close


def episodes(seed=0):
    """Three episodes of 6, 4 and 1 actions; what lies on the padding must not matter."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.arange(6) < torch.tensor([[6], [4], [1]])
    rewards, values, log_ratio = torch.randn(3, 3, 6, generator=generator, dtype=torch.float64)
    return rewards, values, 0.5 * log_ratio, mask


def by_definition(rewards, values, mask, delta_weight, trace, gamma):
    """sum_k gamma^(k-t) (prod_{i=t+1..k} trace_i) delta_weight_k delta_k, one term at a time."""
    out = torch.zeros_like(rewards)
    for row, length in enumerate(mask.sum(1).tolist()):
        for t in range(length):
            product = 1.0
            for k in range(t, length):
                if k > t:
                    product *= gamma * float(trace[row, k])
                next_value = values[row, k + 1] if k + 1 < length else 0.0
                delta = rewards[row, k] + gamma * next_value - values[row, k]
                out[row, t] += product * delta_weight[row, k] * delta
    return out


def test_gae_on_a_hand_worked_episode():
    rewards, values = torch.tensor([[0.0, 1.0, 0.0]]), torch.tensor([[0.5, 0.5, 9.0]])  # third column is padding
    advantages, returns = gae(rewards, values, torch.tensor([[True, True, False]]), gamma=1.0, lam=0.5)
    # deltas: 0 + 0.5 - 0.5 = 0 and 1 - 0.5 = 0.5, so A_0 = 0 + 0.5 * 0.5
    torch_close(advantages, torch.tensor([[0.25, 0.5, 0.0]]))
    torch_close(returns, torch.tensor([[0.75, 1.0, 0.0]]))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 33])
def test_the_recurrence_by_doubling_is_the_recurrence_step_by_step(length):
    torch.manual_seed(0)
    x, decay = torch.randn(2, length, dtype=torch.float64), torch.rand(2, length, dtype=torch.float64)
    expected, y = torch.zeros_like(x), torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(length)):
        y = x[:, t] + decay[:, t] * y
        expected[:, t] = y
    torch_close(backward_recurrence(x, decay), expected)


def test_gae_with_lam_1_is_the_return_minus_the_value():
    rewards, values, _, mask = episodes()
    torch_close(gae(rewards, values, mask, gamma=0.9, lam=1.0), monte_carlo(rewards, values, mask, gamma=0.9))


def test_gae_with_lam_0_is_the_td_error():
    rewards, values, _, mask = episodes()
    advantages, _ = gae(rewards, values, mask, gamma=0.9, lam=0.0)
    ones, zeros = torch.ones_like(rewards), torch.zeros_like(rewards)
    torch_close(advantages, by_definition(rewards, values, mask, ones, zeros, 0.9))


def test_gae_against_its_definition():
    rewards, values, _, mask = episodes()
    advantages, returns = gae(rewards, values, mask, gamma=0.9, lam=0.7)
    ones = torch.ones_like(rewards)
    torch_close(advantages, by_definition(rewards, values, mask, ones, 0.7 * ones, 0.9))
    torch_close(returns, (advantages + values) * mask)


def test_td_lambda_is_gae():
    rewards, values, _, mask = episodes()
    torch_close(td_lambda(rewards, values, mask, gamma=0.9, lam=0.7), gae(rewards, values, mask, gamma=0.9, lam=0.7))


def test_td_lambda_on_a_hand_worked_episode():
    # G_1 = 4; G_0 = 0 + 0.5 * (0.5 * 2 + 0.5 * 4) = 1.5
    rewards, values = torch.tensor([[0.0, 4.0]]), torch.tensor([[1.0, 2.0]])
    advantages, returns = td_lambda(rewards, values, torch.ones(1, 2, dtype=torch.bool), gamma=0.5, lam=0.5)
    torch_close(returns, torch.tensor([[1.5, 4.0]]))
    torch_close(advantages, torch.tensor([[0.5, 2.0]]))


def test_n_step_on_a_hand_worked_episode():
    # n = 2: G_0 = 1 + 0.5 * 2 + 0.25 * 30 = 9.5; G_1 = 2 + 0.5 * 4 = 4 (past the end the value is 0); G_2 = 4
    rewards, values = torch.tensor([[1.0, 2.0, 4.0]]), torch.tensor([[10.0, 20.0, 30.0]])
    advantages, returns = n_step(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5, n=2)
    torch_close(returns, torch.tensor([[9.5, 4.0, 4.0]]))
    torch_close(advantages, torch.tensor([[-0.5, -16.0, -26.0]]))


@pytest.mark.parametrize("n", [6, 7, 100])
def test_n_step_from_the_length_on_is_monte_carlo(n):
    rewards, values, _, mask = episodes()
    torch_close(n_step(rewards, values, mask, gamma=0.9, n=n), monte_carlo(rewards, values, mask, gamma=0.9))


def test_one_step_is_gae_with_lam_0():
    rewards, values, _, mask = episodes()
    torch_close(n_step(rewards, values, mask, gamma=0.9, n=1), gae(rewards, values, mask, gamma=0.9, lam=0.0))


def test_zero_steps_are_refused():
    rewards, values, _, mask = episodes()
    with pytest.raises(ValueError, match="n=0"):
        n_step(rewards, values, mask, gamma=1.0, n=0)


def test_monte_carlo_on_a_hand_worked_episode():
    rewards, values = torch.tensor([[1.0, 0.0, 4.0]]), torch.tensor([[1.0, 1.0, 1.0]])
    advantages, returns = monte_carlo(rewards, values, torch.ones(1, 3, dtype=torch.bool), gamma=0.5)
    torch_close(returns, torch.tensor([[2.0, 2.0, 4.0]]))
    torch_close(advantages, torch.tensor([[1.0, 1.0, 3.0]]))


def test_vtrace_with_equal_policies_is_td_1():
    rewards, values, _, mask = episodes()
    ours = vtrace(rewards, values, torch.zeros_like(rewards), mask, gamma=0.9)
    torch_close(ours, td_lambda(rewards, values, mask, gamma=0.9, lam=1.0))


def test_vtrace_against_its_definition():
    rewards, values, log_ratio, mask = episodes()
    advantages, returns = vtrace(rewards, values, log_ratio, mask, gamma=0.9, lam=0.8, rho_bar=1.2, c_bar=0.9)
    u = log_ratio.exp()
    # v_t - V_t = sum_k gamma^(k-t) (prod_{i=t..k-1} c_i) rho_k delta_k: the traces lie one step earlier than Retrace's
    earlier = torch.cat([torch.zeros(3, 1), 0.8 * u.clamp(max=0.9)[:, :-1]], 1)
    rho = u.clamp(max=1.2)
    expected = (values + by_definition(rewards, values, mask, rho, earlier, 0.9)) * mask
    torch_close(returns, expected)
    next_return = torch.cat([expected[:, 1:], torch.zeros(3, 1)], 1)
    torch_close(advantages, rho * (rewards + 0.9 * next_return - values) * mask)


def test_vtrace_on_a_hand_worked_step():
    # u = e^log 4 = 4 is cut to rho_bar = 2: delta = 2 (1 - 0.5) = 1, v = 1.5, A = 2 (1 - 0.5) = 1
    one = torch.ones(1, 1, dtype=torch.bool)
    advantages, returns = vtrace(
        torch.tensor([[1.0]]), torch.tensor([[0.5]]), torch.tensor([[4.0]]).log(), one, gamma=1.0, rho_bar=2.0
    )
    torch_close((advantages, returns), (torch.tensor([[1.0]]), torch.tensor([[1.5]])))


def test_retrace_against_its_definition():
    rewards, values, log_ratio, mask = episodes()
    advantages, returns = retrace(rewards, values, log_ratio, mask, gamma=0.9, lam=0.8)
    trace = 0.8 * log_ratio.exp().clamp(max=1.0)
    torch_close(advantages, by_definition(rewards, values, mask, torch.ones_like(rewards), trace, 0.9))
    torch_close(returns, (advantages + values) * mask)


def test_retrace_with_equal_policies_is_gae():
    rewards, values, _, mask = episodes()
    ours = retrace(rewards, values, torch.zeros_like(rewards), mask, gamma=0.9, lam=0.8)
    torch_close(ours, gae(rewards, values, mask, gamma=0.9, lam=0.8))


def test_clipped_is_weighs_gae_and_leaves_the_returns_alone():
    rewards, values = torch.tensor([[1.0, 1.0, 1.0]]), torch.zeros(1, 3)
    log_ratio, mask = torch.tensor([[0.5, 1.1, 3.0]]).log(), torch.ones(1, 3, dtype=torch.bool)
    advantages, returns = clipped_is(rewards, values, log_ratio, mask, gamma=1.0, lam=1.0, clip=0.2)
    torch_close(returns, torch.tensor([[3.0, 2.0, 1.0]]))
    torch_close(advantages, torch.tensor([[3 * 0.8, 2 * 1.1, 1 * 1.2]]))


@pytest.mark.parametrize(
    "estimate",
    [
        lambda r, v, u, m: gae(r, v, m, gamma=0.9, lam=0.8),
        lambda r, v, u, m: td_lambda(r, v, m, gamma=0.9, lam=0.8),
        lambda r, v, u, m: n_step(r, v, m, gamma=0.9, n=2),
        lambda r, v, u, m: monte_carlo(r, v, m, gamma=0.9),
        lambda r, v, u, m: vtrace(r, v, u, m, gamma=0.9),
        lambda r, v, u, m: retrace(r, v, u, m, gamma=0.9, lam=0.8),
        lambda r, v, u, m: clipped_is(r, v, u, m, gamma=0.9, lam=0.8, clip=0.2),
    ],
)
def test_padding_is_zero_and_changes_nothing(estimate):
    rewards, values, log_ratio, mask = episodes()
    padded = estimate(rewards, values, log_ratio, mask)
    alone = estimate(*(x[1:2, :4] for x in (rewards, values, log_ratio, mask)))
    for a, b in zip(padded, alone, strict=True):
        torch_close(a[1:2, :4], b)
        assert not a[~mask].any()


def test_an_enormous_ratio_stays_finite():
    assert importance_ratio(torch.tensor([1000.0, -1000.0])).isfinite().all()
    assert (importance_ratio(torch.tensor([1000.0])) * 0).item() == 0


GROUPS = torch.tensor([5, 2, 5, 2, 9])  # in any order; 9 is alone
RETURNS = torch.tensor([1.0, 0.0, 3.0, 4.0, 7.0])


def test_group_relative_by_hand():
    # group 5: mean 2, unbiased std sqrt 2; group 2: mean 2, unbiased std sqrt 8
    half = 0.5**0.5
    unbiased = group_relative(RETURNS, GROUPS, divide_by_std=True, unbiased=True)
    torch_close(unbiased, torch.tensor([-half, -half, half, half, 0.0]), atol=1e-6, rtol=1e-5)
    biased = group_relative(RETURNS, GROUPS, divide_by_std=True, unbiased=False)
    torch_close(biased, torch.tensor([-1.0, -1.0, 1.0, 1.0, 0.0]), atol=2e-6, rtol=1e-5)
    centred = group_relative(RETURNS, GROUPS, divide_by_std=False, unbiased=True)
    torch_close(centred, torch.tensor([-1.0, -2.0, 1.0, 2.0, 0.0]))


def test_equal_rewards_give_advantage_zero_whatever_their_rounding():
    returns = torch.full((7,), 0.1)
    advantages = group_relative(returns, torch.zeros(7, dtype=torch.long), divide_by_std=True, unbiased=True)
    assert advantages.abs().max() < 1e-6


def test_leave_one_out_by_hand():
    returns, groups = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1])
    torch_close(leave_one_out(returns, groups), torch.tensor([1 - 4, 2 - 3.5, 6 - 1.5, 0.0]))


def test_leave_one_out_is_the_centred_reward_times_n_over_n_minus_1():
    returns, groups = torch.rand(6), torch.zeros(6, dtype=torch.long)
    centred = group_relative(returns, groups, divide_by_std=False, unbiased=True)
    torch_close(leave_one_out(returns, groups), centred * 6 / 5)


def test_spread_of_groups():
    returns, groups = torch.tensor([1.0, 0.0, 1.0, 0.5, 3.0]), torch.tensor([1, 0, 1, 0, 2])
    assert has_spread(returns, groups).tolist() == [False, True, False, True, False]
