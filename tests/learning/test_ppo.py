"""The PPO quickstart learns, its critic too: what is stated here was measured with room to spare."""

import pytest


def test_36_steps_raise_the_reward_and_teach_the_critic(fit) -> None:
    logged = fit("quickstart/ppo", "--trainer.max_steps", "37", "--trainer.num_sanity_val_steps", "0")
    rewards, explained = logged["rollout/reward"], logged["train/explained_variance"]
    assert logged["train/policy_rests"] == [1.0] * 16 + [0.0] * 21
    assert rewards[-1] > 1.15 * rewards[0]  # 0.16 -> 0.21 when it was measured; half the sums are out of reach
    assert explained[0] < 0.05
    assert explained[-1] > 0.15  # 0.29 when it was measured
    assert max(logged["train/mismatch_max"]) < 1e-3  # engine and trainer agree on every log-prob


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_accuracy_reaches_0_9_and_the_critic_explains_half_of_the_returns(fit, seed: int) -> None:
    logged = fit("quickstart/ppo", "--seed_everything", str(seed))
    accuracies, explained = logged["val/accuracy"], logged["train/explained_variance"]
    print("measured ppo", seed, accuracies, explained[-1])
    assert accuracies[0] == 0.5
    assert accuracies[-1] >= 0.9
    assert explained[-1] > 0.5
