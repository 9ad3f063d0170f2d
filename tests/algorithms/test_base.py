import math
from pathlib import Path

import lightning as L
import pytest
import torch
from files import write_rows
from quiet import quiet_trainer

from rl2lightning import DPO, SFT, ChatDataModule, OptimizerConfig, PreferenceDataModule


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # 10 steps, 2 of them warm-up: the second has reached the peak
        ({"schedule": "constant"}, {0: 0.5, 1: 1.0, 2: 1.0, 9: 1.0, 20: 1.0}),
        ({"schedule": "linear"}, {0: 0.5, 1: 1.0, 2: 1.0, 4: 0.75, 6: 0.5, 9: 0.125, 10: 0.0, 20: 0.0}),
        ({"schedule": "cosine"}, {0: 0.5, 2: 1.0, 4: 0.8535534, 6: 0.5, 8: 0.1464466, 10: 0.0, 20: 0.0}),
        ({"schedule": "cosine", "min_lr_ratio": 0.2}, {2: 1.0, 6: 0.6, 10: 0.2, 11: 0.2}),
        ({"schedule": "linear", "warmup_ratio": 0.0}, {0: 1.0, 5: 0.5, 10: 0.0}),
        ({"schedule": "linear", "warmup_ratio": 0.01}, {0: 1.0, 1: 1.0, 10: 0.0}),  # any warm-up is at least a step
    ],
)
def test_learning_rate_by_hand(settings: dict, expected: dict[int, float]) -> None:
    config = OptimizerConfig(**{"warmup_ratio": 0.2, **settings})
    assert {step: config.lr_at(step, 10) for step in expected} == pytest.approx(expected)


def test_a_warm_up_as_long_as_the_run_does_not_divide_by_zero() -> None:
    config = OptimizerConfig(warmup_ratio=1.0)
    assert [config.lr_at(step, 2) for step in range(3)] == [0.5, 1.0, 1.0]


def data_for(task: str, **settings) -> ChatDataModule:
    return ChatDataModule(f"conversations@{task}", **{"batch_size": 16, "max_length": 32, "val_ratio": 0.0, **settings})


def test_a_run_without_an_end_is_refused(tiny_model: str, task: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"set trainer\.max_steps or trainer\.max_epochs"):
        quiet_trainer(tmp_path, max_steps=-1, max_epochs=-1).fit(SFT(tiny_model), datamodule=data_for(task))


def test_every_step_takes_the_rate_of_the_schedule_and_decays_matrices_only(
    tiny_model: str, task: str, tmp_path: Path
) -> None:
    rates, decays = [], {}

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
            decays.update({name: decay[id(p)] for name, p in pl_module.policy.lm.named_parameters()})

    config = OptimizerConfig(lr=0.01, weight_decay=0.3, schedule="linear", warmup_ratio=0.5)
    trainer = quiet_trainer(tmp_path, Look(), max_steps=-1, max_epochs=1)  # 64 rows in batches of 16: 4 steps
    trainer.fit(SFT(tiny_model, optimizer=config), datamodule=data_for(task))
    assert rates == pytest.approx([0.005, 0.01, 0.01, 0.005])
    assert decays["model.layers.0.mlp.up_proj.weight"] == decays["model.embed_tokens.weight"] == 0.3
    assert decays["model.norm.weight"] == decays["model.layers.1.self_attn.q_norm.weight"] == 0.0


def test_gradients_are_scaled_down_to_the_norm_asked_for(tiny_model: str, task: str, tmp_path: Path) -> None:
    norms = []

    class Look(L.Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
            gradients = [p.grad.full_tensor() for p in pl_module.policy.parameters()]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    logged = []
    for max_norm in (0.01, 1e6, None):
        trainer = quiet_trainer(tmp_path, Look())
        trainer.fit(SFT(tiny_model, max_grad_norm=max_norm), datamodule=data_for(task))
        logged.append(float(trainer.callback_metrics["train/grad_norm"]))
    assert norms == pytest.approx([0.01, logged[1], logged[1]], rel=1e-3)
    assert logged[0] == logged[1] == logged[2] > 0.1  # what is logged is the norm before


def test_a_sequence_longer_than_the_budget_is_named_with_it(tiny_model: str, task: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_tokens_per_device"):
        quiet_trainer(tmp_path).fit(SFT(tiny_model, max_tokens_per_device=4), datamodule=data_for(task))


def test_the_held_out_loss_is_the_mean_over_all_held_out_tokens(tiny_model: str, task: str, tmp_path: Path) -> None:
    """However they are cut into batches, the last one smaller."""
    losses = [
        quiet_trainer(tmp_path).validate(
            SFT(tiny_model), datamodule=data_for(task, val_ratio=0.2, val_batch_size=size), verbose=False
        )[0]["val/loss"]
        for size in (13, 5, 1)
    ]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-6)


def test_a_held_out_batch_without_a_finite_loss_is_not_left_out(
    tiny_model: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([torch.tensor(math.nan), torch.tensor(0.5)])
    monkeypatch.setattr(SFT, "evaluate", lambda *args, **kwargs: {"loss": next(losses)})
    data = data_for(task, val_ratio=0.125, val_batch_size=4)  # two batches
    (metrics,) = quiet_trainer(tmp_path).validate(SFT(tiny_model), datamodule=data, verbose=False)
    assert math.isnan(metrics["val/loss"])


def test_a_constant_level_has_no_meaning_for_sft(tiny_model: str) -> None:
    with pytest.raises(ValueError, match="loss_level='constant' has no meaning for SFT"):
        SFT(tiny_model, loss_level="constant")


def test_a_run_without_held_out_rows_trains_without_a_sanity_check_too(
    tiny_model: str, task: str, tmp_path: Path
) -> None:
    trainer = quiet_trainer(tmp_path, max_steps=2, num_sanity_val_steps=0)
    trainer.fit(SFT(tiny_model), datamodule=data_for(task))
    assert trainer.global_step == 2
    with pytest.raises(ValueError, match=r"no held-out rows: set data\.val_path or data\.val_ratio"):
        quiet_trainer(tmp_path).validate(SFT(tiny_model), datamodule=data_for(task))


def test_pairs_are_not_imitated(tiny_model: str, tmp_path: Path) -> None:
    rows = [{"messages": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(4)]
    data = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", rows), batch_size=2, val_ratio=0)
    with pytest.raises(ValueError, match="SFT would imitate both"):
        quiet_trainer(tmp_path).fit(SFT(tiny_model), datamodule=data)


def test_a_run_goes_on_by_its_own_algorithm_alone_subclasses_included(
    tiny_model: str, task: str, tmp_path: Path
) -> None:
    class Mine(SFT):
        """Of a user's."""

    def fit(module: L.LightningModule, data: L.LightningDataModule, steps: int, ckpt_path: Path | None = None) -> None:
        trainer = quiet_trainer(tmp_path, max_steps=steps, limit_val_batches=0)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        trainer.save_checkpoint(tmp_path / "a.ckpt")

    fit(SFT(tiny_model), data_for(task), 1)
    fit(Mine(tiny_model), data_for(task), 2, tmp_path / "a.ckpt")
    rows = [{"messages": f"{i}+1=", "chosen": str(i + 1), "rejected": "no"} for i in range(8)]
    pairs = PreferenceDataModule(write_rows(tmp_path / "pairs.jsonl", rows), batch_size=4, val_ratio=0.0)
    with pytest.raises(ValueError, match=r"a.ckpt' is of a run of SFT, which DPO cannot go on with: `rl2l"):
        fit(DPO(tiny_model, reference="live"), pairs, 3, tmp_path / "a.ckpt")
