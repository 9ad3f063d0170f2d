"""The optimizer of a model that learns, and its learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch.optim.lr_scheduler import LambdaLR

from rl2lightning.algorithms.guard import NonFiniteGuard
from rl2lightning.models.policy import PackedModel


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Args:
        lr: peak learning rate.
        betas: decay of the running averages of the gradient and its square.
        eps: term added to the denominator.
        weight_decay: decoupled weight decay, on matrices only (not on norms and biases).
        schedule: shape after the warm-up.
        warmup_ratio: share of all optimizer steps spent warming up linearly.
        min_lr_ratio: where linear and cosine end, as a share of `lr`.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.0

    def lr_at(self, step: int, num_steps: int) -> float:
        """Share of `lr` at a step counted from 0; the warm-up reaches 1 on its last step."""
        warmup = math.ceil(self.warmup_ratio * num_steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        shape = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * shape


@dataclass(eq=False)
class Trained:
    """A model that learns, with what is its own: how its optimizer is set, and the steps it had to skip."""

    model: PackedModel
    optimizer: OptimizerConfig
    guard: NonFiniteGuard


def adamw(trained: Trained) -> torch.optim.AdamW:
    """The optimizer of what of the model learns; norms and biases do not decay."""
    config = trained.optimizer
    parameters = [p for p in trained.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel, and it can skip a step on the device
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def follow_schedules(schedulers: Iterable[object]) -> None:
    """Sets the learning rates to what our schedules say of the step they are at; a user's own are left alone."""
    for scheduler in schedulers:
        if isinstance(scheduler, LambdaLR):
            groups = zip(scheduler.optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
            for group, rate, factor in groups:
                group["lr"] = rate * factor(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in scheduler.optimizer.param_groups]
