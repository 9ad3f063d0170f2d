"""Adapters learn from rewards as all weights do: what is stated here was measured with room to spare."""

import pytest


def test_20_steps_of_grpo_raise_the_reward_by_a_third(fit) -> None:
    logged = fit("quickstart/grpo_lora", "--trainer.max_steps", "20", "--trainer.num_sanity_val_steps", "0")
    rewards = logged["rollout/reward"]
    assert sum(rewards[-5:]) / 5 > 1.33 * sum(rewards[:2]) / 2  # 0.29 -> 0.43 when it was measured
    assert max(logged["train/mismatch_max"]) < 1e-3  # the engine has the adapters, merged


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_lifts_greedy_accuracy_from_half_to_at_least_0_85(fit, seed: int) -> None:
    accuracies = fit("quickstart/grpo_lora", "--seed_everything", str(seed))["val/accuracy"]
    print("measured grpo_lora", seed, accuracies)
    assert accuracies[0] == 0.5
    assert accuracies[-1] >= 0.85
