"""Non-finite steps: skipped where they happen, counted, the end of a run if they stay."""

from pathlib import Path

import lightning as L
import pytest
import torch
from quiet import quiet_trainer
from torch import nn

from rl2lightning import SFT, ChatDataModule, OptimizerConfig, Preemption
from rl2lightning.algorithms.guard import NonFiniteGuard
from rl2lightning.parallel import checkpoint as ckpt
from rl2lightning.types import NonFiniteError

YES, NO = torch.tensor(True), torch.tensor(False)


def adamw() -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.tensor([1.0, 2.0]))], lr=0.1, fused=True)


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.tensor([1.0, 2.0]))], lr=0.1, momentum=0.9)


def step(guard: NonFiniteGuard, optimizer: torch.optim.Optimizer, gradient: float, finite: torch.Tensor | None) -> None:
    p = optimizer.param_groups[0]["params"][0]
    p.grad = torch.full_like(p, gradient)
    guard.before_step(optimizer, finite)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    guard.after_step()


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_skipped_step_leaves_weights_and_optimizer_as_if_it_had_not_been(make) -> None:
    with_skip, without = make(), make()
    guards = NonFiniteGuard(5), NonFiniteGuard(5)
    for optimizer, guard in zip((with_skip, without), guards, strict=True):
        step(guard, optimizer, 1.0, YES)
    before = with_skip.param_groups[0]["params"][0].clone()
    step(guards[0], with_skip, float("nan"), NO)
    assert torch.equal(with_skip.param_groups[0]["params"][0], before)
    assert guards[0].skipped == 1
    for optimizer, guard in zip((with_skip, without), guards, strict=True):
        step(guard, optimizer, 2.0, YES)
    assert torch.equal(with_skip.param_groups[0]["params"][0], without.param_groups[0]["params"][0])
    assert not torch.equal(with_skip.param_groups[0]["params"][0], before)
    assert guards[1].skipped == 0


def test_as_many_in_a_row_as_allowed_raise_one_step_late() -> None:
    guard, optimizer = NonFiniteGuard(2), adamw()
    step(guard, optimizer, 1.0, NO)
    step(guard, optimizer, 1.0, NO)  # the host looks at the step before this one
    with pytest.raises(NonFiniteError, match=r"2 optimizer steps in a row .* lower model\.optimizer\.lr"):
        step(guard, optimizer, 1.0, YES)


def test_a_good_step_starts_the_row_anew() -> None:
    guard, optimizer = NonFiniteGuard(2), adamw()
    for finite in (NO, YES, NO, YES, NO, YES, YES):
        step(guard, optimizer, 1.0, finite)
    assert guard.skipped == 3


def test_a_step_without_gradients_says_nothing() -> None:
    guard, optimizer = NonFiniteGuard(2), adamw()
    for finite in (NO, None, None, YES, YES):
        step(guard, optimizer, 1.0, finite)
    assert guard.skipped == 1


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="max_nonfinite_steps=0 must be at least 1"):
        NonFiniteGuard(0)


# ---- in a fit


class Faulty(SFT):
    """Its loss, or only the gradient of it, is NaN at some optimizer steps."""

    bad_steps: tuple[int, ...] = ()
    only_gradient = False

    def loss(self, seqs):
        values, diagnostics = super().loss(seqs)
        if self.trainer.global_step in self.bad_steps:
            # sqrt of 0 is 0, its derivative infinite, and infinity times 0 is NaN
            values = values + (values * 0).sqrt() if self.only_gradient else values * float("nan")
        return values, diagnostics


class Record(L.Callback):
    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []
        self.skipped: list[float] = []
        self.learning_rates: list[float] = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.weights.append(torch.cat([w.flatten().clone() for _, w in pl_module.policy_weights()]))
        self.skipped.append(float(trainer.callback_metrics["train/skipped_steps"]))
        self.learning_rates.append(trainer.optimizers[0].param_groups[0]["lr"])


def fit(model: str, task: str, root: Path, bad_steps: tuple[int, ...], *, steps: int, **settings) -> tuple:
    module = Faulty(
        model,
        optimizer=OptimizerConfig(lr=1e-2, schedule="linear", warmup_ratio=0.0),
        max_tokens_per_device=100,
        **settings,
    )
    module.bad_steps = bad_steps
    record = Record()
    trainer = quiet_trainer(root, record, Preemption(), max_steps=steps, enable_checkpointing=True)
    data = ChatDataModule(f"conversations@{task}", batch_size=8, max_length=32, val_ratio=0.0)
    return trainer, module, data, record


@pytest.mark.parametrize("only_gradient", [False, True])
def test_a_non_finite_step_is_counted_and_moves_nothing(
    tiny_model: str, task: str, tmp_path: Path, only_gradient: bool
) -> None:
    trainer, module, data, record = fit(tiny_model, task, tmp_path, (1,), steps=4)
    module.only_gradient = only_gradient
    trainer.fit(module, datamodule=data)
    assert trainer.global_step == 4
    assert record.skipped == [0, 1, 1, 1]
    assert torch.equal(record.weights[1], record.weights[0])
    assert not torch.equal(record.weights[2], record.weights[1])
    assert torch.isfinite(record.weights[3]).all()
    assert record.learning_rates == pytest.approx([0.0075, 0.005, 0.0025, 0.0])  # the schedule goes on


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # the resumed run writes elsewhere
def test_too_many_in_a_row_end_the_run_with_a_checkpoint(tiny_model: str, task: str, tmp_path: Path) -> None:
    trainer, module, data, record = fit(tiny_model, task, tmp_path, (2, 3, 4, 5), steps=7, max_nonfinite_steps=3)
    with pytest.raises(NonFiniteError, match="3 optimizer steps in a row"):
        trainer.fit(module, datamodule=data)
    path = tmp_path / "checkpoints/interrupted.ckpt"
    saved = ckpt.load_full_weights(path, "policy.lm.")
    last_good = record.weights[1]
    assert torch.equal(torch.cat([saved[name].flatten() for name, _ in module.policy_weights()]), last_good)
    # and the run can go on from there
    trainer, module, data, record = fit(tiny_model, task, tmp_path / "again", (), steps=7)
    trainer.fit(module, datamodule=data, ckpt_path=path)
    assert trainer.global_step == 7
    assert not torch.equal(record.weights[-1], last_good)
