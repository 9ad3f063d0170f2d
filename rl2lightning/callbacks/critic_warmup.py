"""`CriticWarmup`: the critic learns what the policy's rollouts are worth before the policy learns from it."""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn


class CriticWarmup(L.Callback):
    """Trains PPO's critic alone for the first optimizer steps of a run, on rollouts of the policy as it is.

    The policy's steps change nothing then, but they count: towards `max_steps` and along its learning-rate schedule,
    whose own warm-up should therefore last longer than this one, or be none. A rollout that begins within these steps
    belongs to the critic to its end: its advantages are over values from before the critic has learned. All of this
    follows from `global_step`, so that a resumed run goes on where it was.

    Args:
        num_steps: optimizer steps that belong to the critic, rounded up to whole rollouts.
        target: what it learns. monte_carlo: the return to the end of each trajectory, by plain regression: value
            pre-training. bootstrapped: what it goes on with afterwards, the returns of `advantage`, clipped.
    """

    def __init__(self, num_steps: int, target: Literal["monte_carlo", "bootstrapped"] = "monte_carlo") -> None:
        if num_steps < 1:
            raise ValueError(f"num_steps={num_steps} of the critic's warm-up must be at least 1; or leave it out")
        self.num_steps = num_steps
        self.target: Literal["monte_carlo", "bootstrapped"] = target

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        if "critic" not in pl_module.trained:
            raise ValueError(f"{type(pl_module).__name__} has no critic to warm up: take CriticWarmup out, or use PPO")
        per_rollout = pl_module.updates_per_rollout
        last = -(-self.num_steps // per_rollout) * per_rollout  # whole rollouts
        if trainer.global_step < last:
            rank_zero_info(f"the critic alone learns for the first {last} steps")
        if last >= trainer.estimated_stepping_batches:
            rank_zero_warn(
                f"the critic's warm-up (num_steps={self.num_steps}, in whole rollouts {last}) takes all "
                f"{trainer.estimated_stepping_batches} steps of this run, so that the policy learns nothing: lower "
                "num_steps of CriticWarmup, or train for longer (trainer.max_steps)"
            )

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        start_of_rollout = trainer.global_step - batch.step_of_rollout
        pl_module.critic_warmup = self.target if start_of_rollout < self.num_steps else None

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.critic_warmup = None  # of another fit another callback decides
