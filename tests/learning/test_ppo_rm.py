"""From preferences to a policy: a reward model learns from pairs, and PPO earns by its opinion alone."""

from pathlib import Path

import pytest

from rl2lightning.export import export

PPO_RM = Path(__file__).parents[2] / "configs/quickstart/ppo_rm.yaml"


@pytest.mark.slow
def test_a_policy_learns_to_add_from_a_reward_model_that_learned_from_pairs(fit, tmp_path: Path) -> None:
    pairs = fit("quickstart/rm")
    assert pairs["val/accuracy"][-1] >= 0.9
    reward_model = str(tmp_path / "my-reward-model")
    export(str(tmp_path / "quickstart/rm/version_0/checkpoints/last.ckpt"), reward_model)
    config = tmp_path / "ppo_rm.yaml"
    config.write_text(PPO_RM.read_text().replace("my-reward-model", reward_model))
    root = str(tmp_path / "quickstart/ppo_rm")  # the second config would have its own again
    logged = fit("quickstart/ppo_rm", "--config", str(config), "--trainer.default_root_dir", root)
    accuracies, rewards = logged["val/accuracy"], logged["rollout/score/reward_model"]
    print("measured ppo_rm", pairs["val/accuracy"], accuracies, rewards[0], rewards[-1])
    assert logged["rollout/reward"] == rewards  # how often the answer is right counts for nothing
    assert accuracies[0] == 0.5
    assert accuracies[-1] >= 0.85  # 0.958 and 0.930 when it was measured last
