"""GRPO and its relatives: the advantage estimator, the policy loss and the averaging level say which one it is."""

from __future__ import annotations

from typing import Any

from rl2lightning.algorithms.policy_gradient import PolicyGradient
from rl2lightning.types import PromptBatch


class GRPO(PolicyGradient):
    """Policy gradient on groups of samples without a critic (Shao et al., 2024, arXiv:2402.03300).

    Samples whose advantage is 0 cost no forward pass where their loss is 0 as well; the means that are logged are over
    the others. The defaults are GRPO; Dr. GRPO, DAPO, RLOO, REINFORCE++, GSPO and CISPO are a config each (`configs/`).

    Args:
        updates_per_rollout: optimizer steps per rollout, each on its own share of the samples; no more than there are.
        **kwargs: see `PolicyGradient` and `PostTrainingModule`.
    """

    shares_setting = "updates_per_rollout"

    def __init__(self, *args: Any, updates_per_rollout: int = 1, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if updates_per_rollout < 1:
            raise ValueError(f"updates_per_rollout={updates_per_rollout} must be at least 1")
        if self.advantage.needs_values:
            raise ValueError(f"{type(self.advantage).__name__} needs a critic, which GRPO has not: use PPO")
        self.updates_per_rollout = self.mini_batches = updates_per_rollout

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.prepare(batch)
        share = self.share(self.experience, batch.step_of_rollout)
        self.update(share, self.loss, level=self.loss_level, length=self.loss_length)
        self.finish(batch)
