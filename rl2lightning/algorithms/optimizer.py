"""The optimizer of a model that learns, and its learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
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
    schedule: LambdaLR | None = None  # and in it the optimizer
    logged: set[str] = field(default_factory=set)  # metrics of its steps


def adamw(trained: Trained, num_steps: int) -> LambdaLR:
    """The schedule, and in it the optimizer, of what of the model learns; norms and biases do not decay."""
    config = trained.optimizer
    parameters = [p for p in trained.model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    # fused: one kernel, and it can skip a step on the device
    optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
    return LambdaLR(optimizer, partial(config.lr_at, num_steps=num_steps))


def follow_config(schedule: LambdaLR, config: OptimizerConfig) -> None:
    """Sets what a checkpoint has brought back of another run's settings to those of this run, schedule included."""
    decay = (config.weight_decay, 0.0)  # of the groups of `adamw`
    schedule.base_lrs = [config.lr] * len(decay)
    groups = zip(schedule.optimizer.param_groups, decay, schedule.lr_lambdas, strict=True)
    for group, weight_decay, factor in groups:
        group |= {"betas": config.betas, "eps": config.eps, "weight_decay": weight_decay, "initial_lr": config.lr}
        group["lr"] = config.lr * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in schedule.optimizer.param_groups]
