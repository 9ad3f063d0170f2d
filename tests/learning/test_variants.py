"""Every preset of GRPO learns: each on the quickstart's sums, by the shipped config's own algorithm."""

import json

import pytest

# the relatives that others do not stand for run always: resampled groups with several updates, and KL in the reward
ALWAYS = ("dapo", "rloo")
SEVERAL_UPDATES = ("dapo", "gspo", "cispo", "reinforce_pp")  # four steps on each rollout
PRESETS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce_pp")


def quickstart(preset: str, **settings: object) -> list[str]:
    """Arguments that put the quickstart's model and sums in the place of the preset's own."""
    rollouts = {
        "engine": {"class_path": "rl2lightning.HFEngine", "init_args": {"max_num_seqs": 1024}},
        "environment": "configs/quickstart/arithmetic.py",
        "dynamic_sampling": preset == "dapo",
        "max_refills": 1,
    }
    every = {
        "model.model": "configs/quickstart/model",
        "model.sampling.max_tokens": 8,
        "data.path": "prompts@configs/quickstart/arithmetic.py",
        "trainer.callbacks": json.dumps([{"class_path": "rl2lightning.RolloutCallback", "init_args": rollouts}]),
        "trainer.precision": "32-true",
        "trainer.enable_checkpointing": "false",
    }
    return [f"--{name}={value}" for name, value in (every | settings).items()]


@pytest.mark.filterwarnings("ignore:dynamic sampling found")  # fewer groups than it looked for
@pytest.mark.parametrize(
    "preset", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in PRESETS]
)
def test_rewards_rise_within_25_steps(fit, preset: str) -> None:
    settings = {
        "model.optimizer": "{lr: 2.0e-4, schedule: constant, warmup_ratio: 0.4, weight_decay: 0.0}",
        "data.prompts_per_rollout": 128 if preset in SEVERAL_UPDATES else 64,
        "trainer.max_steps": 25,
        "trainer.limit_val_batches": 0,
    }
    logged = fit(preset, *quickstart(preset, **settings))
    rewards = logged["rollout/reward"]
    early, late = rewards[:4], rewards[-5:]  # the first rollout, and the last two, of those with several updates
    assert sum(late) / 5 > sum(early) / 4 + 0.03  # by 0.10 when it was measured
    assert max(logged["train/skipped_steps"]) == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamic sampling found")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("preset", [name for name in PRESETS if name != "grpo"])  # grpo: test_quickstart.py
def test_greedy_accuracy_rises_from_half_to_at_least_0_85(fit, preset: str, seed: int) -> None:
    several = preset in SEVERAL_UPDATES
    settings = {
        "seed_everything": seed,
        "model.optimizer": "{lr: 3.0e-4, schedule: linear, warmup_ratio: 0.05, weight_decay: 0.0}",
        "data.prompts_per_rollout": 256 if several else 128,
        "data.val_batch_size": 500,
        "data.val_ratio": 0.05,
        "trainer.max_epochs": -1,
        "trainer.max_steps": 240 if several else 160,  # 60 rollouts or 160
        "trainer.val_check_interval": 80,
    }
    logged = fit(preset, *quickstart(preset, **settings))
    accuracies = logged["val/accuracy"]
    print("measured", preset, seed, accuracies)
    assert accuracies[0] == 0.5
    assert accuracies[-1] >= 0.85
    assert max(logged["train/skipped_steps"]) == 0
