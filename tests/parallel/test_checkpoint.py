"""Checkpoints: a resumed run equals the uninterrupted one bit for bit, and a directory is complete or absent."""

import random
import shutil
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rl2lightning import GRPO, SFT, ChatDataModule, FSDP2TPStrategy, OptimizerConfig, PromptDataModule, RolloutCallback
from rl2lightning.parallel import checkpoint as ckpt
from rl2lightning.policy_losses import KLPenalty
from rl2lightning.types import SamplingParams

STEPS = 6
pytestmark = [
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),  # a resumed run writes elsewhere
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:.*callbacks used to create the checkpoint need to be provided"),
]
OPTIMIZER = OptimizerConfig(lr=1e-2, schedule="cosine", warmup_ratio=0.3)


class Record(L.Callback):
    """What every step logged and drew, and the weights at the end."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.weights: dict[str, torch.Tensor] = {}
        self.reference: dict[str, torch.Tensor] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.drawn = {"torch": float(torch.rand(())), "numpy": float(np.random.rand()), "python": random.random()}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        names = ("train/loss", "train/grad_norm", "train/kl")
        metrics = {name: float(trainer.callback_metrics[name]) for name in names if name in trainer.callback_metrics}
        data = {
            "rows": [row["messages"] for row in batch.rows],
            "completions": [t.token_ids for t in batch.trajectories],
        }
        self.steps.append({**metrics, **self.drawn, **data, "lr": trainer.optimizers[0].param_groups[0]["lr"]})

    def on_train_end(self, trainer, pl_module) -> None:
        self.weights = {name: x.clone() for name, x in pl_module.policy_weights()}
        if getattr(pl_module, "reference", None) is not None:
            self.reference = {name: p.full_tensor().clone() for name, p in pl_module.reference.lm.named_parameters()}


def trainer_for(root: Path, *callbacks: L.Callback, **settings) -> L.Trainer:
    return L.Trainer(
        strategy=FSDP2TPStrategy(),
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=root,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        **{"max_steps": STEPS, **settings},
    )


def every_step(root: Path) -> ModelCheckpoint:
    return ModelCheckpoint(root, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def sft(model: str, task: str):
    data = ChatDataModule(f"conversations@{task}", batch_size=16, max_length=32)
    return SFT(model, optimizer=OPTIMIZER, max_tokens_per_device=100), data, []


def grpo(model: str, task: str, **settings):
    module = GRPO(
        model,
        optimizer=OPTIMIZER,
        sampling=SamplingParams(max_tokens=6),
        samples_per_prompt=4,
        **{"updates_per_rollout": 2, **settings},
    )
    data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, val_ratio=0.1)
    return module, data, [RolloutCallback(environment=task)]


CASES = {
    "sft": sft,
    "grpo": lambda model, task: grpo(model, task, updates_per_rollout=1),
    "grpo_two_updates_per_rollout": grpo,
    # the reference moves at steps 2, 4, 6, so that a checkpoint has to carry it
    "grpo_moving_reference": lambda model, task: grpo(model, task, kl=KLPenalty(0.1), reference_every=2),
}


def run(case: str, model: str, task: str, root: Path, ckpt_path: Path | None = None) -> Record:
    L.seed_everything(1 if ckpt_path is None else 2, verbose=False)  # a resumed run does not live off its seed
    module, data, callbacks = CASES[case](model, task)
    record = Record()
    trainer_for(root, record, *callbacks, every_step(root)).fit(module, datamodule=data, ckpt_path=ckpt_path)
    return record


@pytest.fixture(scope="module")
def whole_runs(tiny_model: str, task: str, tmp_path_factory: pytest.TempPathFactory):
    """Uninterrupted runs and the directory of their checkpoints, by case; each is made once."""
    runs: dict[str, tuple[Record, Path]] = {}

    def get(case: str) -> tuple[Record, Path]:
        if case not in runs:
            root = tmp_path_factory.mktemp(case)
            runs[case] = run(case, tiny_model, task, root), root
        return runs[case]

    return get


# step 3 of two updates per rollout is in the middle of the second rollout
@pytest.mark.parametrize(("case", "step"), [(case, 3) for case in CASES] + [("grpo_two_updates_per_rollout", 4)])
def test_a_resumed_run_equals_the_uninterrupted_one(
    whole_runs, tiny_model: str, task: str, tmp_path: Path, case: str, step: int
) -> None:
    whole, root = whole_runs(case)
    resumed = run(case, tiny_model, task, tmp_path, root / f"step={step}.ckpt")
    assert len(whole.steps) == STEPS
    assert resumed.steps == whole.steps[step:]  # every number to the last bit
    for ours, theirs in ((resumed.weights, whole.weights), (resumed.reference, whole.reference)):
        assert ours.keys() == theirs.keys()
        for name, x in theirs.items():
            assert torch.equal(ours[name], x), name


def test_the_runs_above_are_about_something(whole_runs) -> None:
    for case in CASES:
        steps = whole_runs(case)[0].steps
        assert len({s["train/grad_norm"] for s in steps}) == STEPS, case
        assert len({s["lr"] for s in steps}) > 3
    losses = [s["train/loss"] for s in whole_runs("sft")[0].steps]
    assert losses[-1] < losses[0]
    moving = whole_runs("grpo_moving_reference")[0]
    assert moving.reference
    for name, x in moving.reference.items():
        assert torch.equal(moving.weights[name], x), name  # step 6 copied the policy


def test_a_fixed_reference_is_not_saved_and_a_moving_one_is(tiny_model: str, task: str, whole_runs, tmp_path) -> None:
    _, root = whole_runs("grpo_moving_reference")
    assert ckpt.load_full_weights(root / "step=3.ckpt", "reference.lm.")
    module, data, callbacks = grpo(tiny_model, task, kl=KLPenalty(0.1))
    trainer_for(tmp_path, *callbacks, every_step(tmp_path), max_steps=1).fit(module, datamodule=data)
    with pytest.raises(ValueError, match=r"holds no weights named 'reference\.lm\.\*'"):
        ckpt.load_full_weights(tmp_path / "step=1.ckpt", "reference.lm.")


def test_a_fixed_reference_is_that_of_the_model_directory_after_a_resume(tiny_model: str, task: str, tmp_path) -> None:
    for ckpt_path in (None, tmp_path / "step=1.ckpt"):
        module, data, callbacks = grpo(tiny_model, task, kl=KLPenalty(0.1), updates_per_rollout=1)
        trainer = trainer_for(tmp_path, *callbacks, every_step(tmp_path), max_steps=1 if ckpt_path is None else 2)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        start = dict(module.strategy.build_policy(tiny_model, random_init=False).named_parameters())
        for name, p in module.reference.named_parameters():
            assert torch.equal(p.full_tensor(), start[name].full_tensor())


# ---- complete or absent


def test_a_checkpoint_holds_what_its_description_says(whole_runs) -> None:
    path = whole_runs("sft")[1] / "step=3.ckpt"
    assert {p.name for p in path.iterdir()} == {"dcp", "meta.pt", "rank_00000.pt", "model"}
    assert {"config.json", "tokenizer.json"} <= {p.name for p in (path / "model").iterdir()}
    meta = torch.load(path / "meta.pt", weights_only=True)
    assert meta["global_step"] == 3
    assert not {"state_dict", "optimizer_states"} & set(meta)  # those are in dcp/, once


@pytest.mark.parametrize("part", ["dcp", "model files"])
def test_a_save_that_fails_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str, task: str, tmp_path: Path, part: str
) -> None:
    module, data, _ = sft(tiny_model, task)
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.fit(module, datamodule=data)
    new, old = tmp_path / "new.ckpt", tmp_path / "old.ckpt"
    trainer.save_checkpoint(old)
    before = {name: x.clone() for name, x in ckpt.load_full_weights(old, "policy.lm.").items()}
    with torch.no_grad():
        for p in module.policy.parameters():
            p.add_(1.0)

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    if part == "dcp":
        monkeypatch.setattr(ckpt.dcp, "save", full_disk)
    else:
        monkeypatch.setattr(module, "write_model_files", full_disk)
    for path in (new, old):
        with pytest.raises(ckpt.CheckpointError, match=r"was not written: OSError: No space left .* \(process 0\)"):
            trainer.save_checkpoint(path)
    monkeypatch.undo()
    assert not new.exists()
    ckpt.check(old)
    for name, x in ckpt.load_full_weights(old, "policy.lm.").items():
        assert torch.equal(x, before[name])
    trainer.save_checkpoint(new)  # the leavings of a failed save are in nobody's way
    trainer.save_checkpoint(old)
    for path in (new, old):
        weight = ckpt.load_full_weights(path, "policy.lm.")["model.norm.weight"]
        assert torch.equal(weight, before["model.norm.weight"] + 1.0)
    assert {p.name for p in tmp_path.glob("*.ckpt*")} == {"new.ckpt", "old.ckpt"}


def test_replaced_checkpoints_leave_nothing_behind(tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    newest = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=1)
    trainer_for(tmp_path, newest, max_steps=3).fit(module, datamodule=data)
    assert [p.name for p in tmp_path.iterdir()] == ["step=3.ckpt"]


@pytest.mark.parametrize("gone", ["meta.pt", "dcp/.metadata"])
def test_an_incomplete_checkpoint_is_refused_by_name(whole_runs, tmp_path: Path, gone: str) -> None:
    path = tmp_path / "half.ckpt"
    shutil.copytree(whole_runs("sft")[1] / "step=3.ckpt", path)
    (path / gone).unlink()
    with pytest.raises(ValueError, match=r"half\.ckpt' is not a complete checkpoint"):
        ckpt.check(path)


def test_a_checkpoint_that_does_not_exist_is_named(tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    with pytest.raises(ValueError, match=r"nowhere\.ckpt' does not exist; set --ckpt_path"):
        trainer_for(tmp_path).fit(module, datamodule=data, ckpt_path=tmp_path / "nowhere.ckpt")


# ---- other uses


def test_validation_uses_the_weights_of_the_checkpoint(whole_runs, tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    trainer = trainer_for(tmp_path)
    losses = {
        name: trainer.validate(module, datamodule=data, ckpt_path=path, verbose=False)[0]["val/loss"]
        for name, path in (("start", None), ("trained", whole_runs("sft")[1] / f"step={STEPS}.ckpt"))
    }
    stored = ckpt.load_full_weights(whole_runs("sft")[1] / f"step={STEPS}.ckpt", "policy.lm.")
    for name, x in module.policy_weights():
        assert torch.equal(x, stored[name])
    assert losses["trained"] < losses["start"]


def test_random_states_of_all_three_kinds_are_restored() -> None:
    def draw() -> tuple[float, float, float, float]:
        return float(torch.rand(())), float(np.random.normal()), float(np.random.rand()), random.gauss(0, 1)

    draw()
    state = ckpt.rng_state()
    expected = [draw() for _ in range(3)]
    ckpt.restore_rng(state)
    assert [draw() for _ in range(3)] == expected


def test_another_strategy_is_refused_by_name(tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    trainer = L.Trainer(accelerator="cpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False)
    with pytest.raises(ValueError, match=r"trainer\.strategy is SingleDeviceStrategy; .* need FSDP2TPStrategy"):
        trainer.fit(module, datamodule=data)


def test_precisions_that_fsdp_has_no_use_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trainer\.precision=16-true is not supported: use 32-true, bf16-mixed"):
        trainer_for(tmp_path, precision="16-true")


def test_a_checkpoint_whose_replacement_was_cut_short_is_found_under_its_other_name(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    assert ckpt.locate(path) == path
    aside = tmp_path / "last.ckpt.old"  # where the old one waits while the new one takes its name
    aside.mkdir()
    assert ckpt.locate(path) == aside
    path.mkdir()
    assert ckpt.locate(path) == path
