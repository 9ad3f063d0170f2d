"""Every preset of GRPO learns: a few steps of each on the quickstart's sums, by the shipped config's own algorithm."""

import json

import pytest

# the relatives that others do not stand for run always: resampled groups with several updates, and KL in the reward
ALWAYS = ("dapo", "rloo")
SEVERAL_UPDATES = ("dapo", "gspo", "cispo", "reinforce_pp")  # four steps on each of 7 rollouts, instead of one on 25
PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")


@pytest.mark.filterwarnings("ignore:dynamic sampling found")  # fewer groups than it looked for
@pytest.mark.parametrize(
    "preset", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_rewards_rise_within_25_steps(fit, preset: str) -> None:
    rollouts = {
        "engine": {"class_path": "rl2lightning.HFEngine", "init_args": {"max_num_seqs": 512}},
        "environment": "configs/quickstart/arithmetic.py",
        "dynamic_sampling": preset == "dapo",
        "max_refills": 1,
    }
    settings = {
        "model.model": "configs/quickstart/model",
        "model.optimizer": "{lr: 2.0e-4, schedule: constant, warmup_ratio: 0.4, weight_decay: 0.0}",
        "model.sampling.max_tokens": 8,
        "data.path": "prompts@configs/quickstart/arithmetic.py",
        "data.prompts_per_rollout": 128 if preset in SEVERAL_UPDATES else 64,
        "trainer.callbacks": json.dumps([{"class_path": "rl2lightning.RolloutCallback", "init_args": rollouts}]),
        "trainer.precision": "32-true",
        "trainer.max_steps": 25,
        "trainer.limit_val_batches": 0,
        "trainer.enable_checkpointing": "false",
    }
    logged = fit(preset, *(f"--{name}={value}" for name, value in settings.items()))
    rewards = logged["rollout/reward"]
    early, late = rewards[:4], rewards[-5:]  # the first rollout, and the last two, of those with several updates
    print(preset, rewards)
    assert sum(late) / 5 > sum(early) / 4 + 0.03  # by 0.10 when it was measured
    assert max(logged["train/skipped_steps"]) == 0
