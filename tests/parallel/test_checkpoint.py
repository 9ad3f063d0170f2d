"""Checkpoints: a resumed run equals the uninterrupted one bit for bit, and a directory is complete or absent."""

import os
import random
import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from rl2lightning import (
    GRPO,
    RM,
    SFT,
    ChatDataModule,
    FSDP2TPStrategy,
    OptimizerConfig,
    PreferenceDataModule,
    PromptDataModule,
    RolloutCallback,
)
from rl2lightning.cli import Trainer
from rl2lightning.models.build import full_weights
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
        self.weights = {name: x.clone() for name, x in full_weights(pl_module.primary.model.lm)}
        if getattr(pl_module, "reference", None) is not None:
            self.reference = {name: p.full_tensor().clone() for name, p in pl_module.reference.lm.named_parameters()}


def trainer_for(root: Path, *callbacks: L.Callback, kind: type[L.Trainer] = L.Trainer, **settings) -> L.Trainer:
    return kind(
        strategy=FSDP2TPStrategy(async_checkpoints=settings.pop("async_checkpoints", False)),
        accelerator="cpu",
        callbacks=list(callbacks),
        default_root_dir=root,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=2,
        check_val_every_n_epoch=None,
        **{"max_steps": STEPS, "logger": False, **settings},
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


def rm(model: str, task: str):
    data = PreferenceDataModule(f"pairs@{task}", batch_size=8, max_length=32)
    return RM(model, optimizer=OPTIMIZER, max_tokens_per_device=60), data, []


CASES = {
    "sft": sft,
    "rm": rm,
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


def test_a_checkpoint_of_the_best_validation_is_no_worse_a_start(tiny_model: str, task: str, tmp_path: Path) -> None:
    """It is saved when validation ends, not when a step does."""

    class Validations(L.Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[int, float]] = []

        def on_validation_end(self, trainer, pl_module) -> None:
            self.seen.append((trainer.global_step, float(trainer.callback_metrics["val/loss"])))

    def fit(name: str, ckpt_path: Path | None = None) -> tuple[Record, list[tuple[int, float]]]:
        L.seed_everything(1 if ckpt_path is None else 2, verbose=False)
        module, data, _ = sft(tiny_model, task)
        record, validations = Record(), Validations()
        best = ModelCheckpoint(tmp_path / name, "{step}", monitor="val/loss", save_top_k=-1)
        trainer_for(tmp_path, record, validations, best, num_sanity_val_steps=0).fit(
            module, datamodule=data, ckpt_path=ckpt_path
        )
        return record, validations.seen

    whole, validated = fit("whole")
    resumed, validated_again = fit("resumed", tmp_path / "whole/step=4.ckpt")
    assert resumed.steps == whole.steps[4:]
    assert [step for step, _ in validated] == [2, 4, 6]
    assert validated_again == validated[2:]
    for name, x in whole.weights.items():
        assert torch.equal(resumed.weights[name], x), name


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


# ---- in the background


class Look(L.Callback):
    """What is in a directory when each step begins: complete checkpoints, and where `last.ckpt` leads."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.seen: list[tuple[set[str], str | None]] = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        complete = {p.name for p in self.directory.glob("step*.ckpt") if ckpt.is_complete(p)}
        last = self.directory / "last.ckpt"
        self.seen.append((complete, last.resolve().name if os.path.lexists(last) else None))


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    save = ckpt.dcp.save

    def slowly(*args, **kwargs):
        time.sleep(0.5)
        return save(*args, **kwargs)

    monkeypatch.setattr(ckpt.dcp, "save", slowly)


@pytest.mark.usefixtures("slow_writes")
def test_training_goes_on_while_a_checkpoint_is_written(tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    look = Look(tmp_path)
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last="link")
    trainer_for(tmp_path, look, saves, max_steps=4, async_checkpoints=True).fit(module, datamodule=data)
    # step n begins while the checkpoint of step n - 1 is being written, so the one before it has to stay
    assert look.seen == [
        (set(), None),
        (set(), None),
        ({"step=1.ckpt"}, "step=1.ckpt"),
        ({"step=2.ckpt"}, "step=2.ckpt"),
    ]
    assert {p.name for p in tmp_path.iterdir()} == {"step=4.ckpt", "last.ckpt"}
    assert os.readlink(tmp_path / "last.ckpt") == "step=4.ckpt"  # relative: the directory can be moved
    stored = ckpt.load_full_weights(tmp_path / "last.ckpt", "policy.lm.")
    for name, x in module.policy_weights():
        assert torch.equal(x, stored[name])


@pytest.mark.parametrize("save_last", ["link", True])
def test_a_link_of_a_run_before_gives_way_and_takes_its_place(
    tiny_model: str, task: str, tmp_path: Path, save_last: Any
) -> None:
    def fit(kind: Any, steps: int, ckpt_path: Path | None) -> None:
        module, data, _ = sft(tiny_model, task)
        saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last=kind)
        trainer_for(tmp_path, saves, max_steps=steps).fit(module, datamodule=data, ckpt_path=ckpt_path)

    fit(save_last, 2, None)
    fit("link" if save_last is True else True, 3, tmp_path / "last.ckpt")
    assert {p.name for p in tmp_path.iterdir()} == {"step=3.ckpt", "last.ckpt"}
    assert (tmp_path / "last.ckpt").is_symlink() == (save_last is True)
    assert ckpt.read_meta(tmp_path / "last.ckpt")["global_step"] == 3


@pytest.mark.parametrize(("failing", "reached"), [(2, 3), (4, 4)])  # found at the next save, or when the fit ends
def test_a_write_that_fails_in_the_background_is_an_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, tiny_model: str, task: str, tmp_path: Path, failing: int, reached: int
) -> None:
    save, calls = ckpt.dcp.save, []

    def full_disk(*args, **kwargs):
        calls.append(args)
        if len(calls) == failing:
            raise OSError("No space left on device")
        return save(*args, **kwargs)

    monkeypatch.setattr(ckpt.dcp, "save", full_disk)
    module, data, _ = sft(tiny_model, task)
    saves = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=1, save_last="link")
    trainer = trainer_for(tmp_path, saves, max_steps=4, async_checkpoints=True)
    with pytest.raises(
        ckpt.CheckpointError, match=rf"step={failing}\.ckpt' was not written: OSError: No space"
    ) as raised:
        trainer.fit(module, datamodule=data)
    assert isinstance(raised.value.__cause__, OSError)
    assert trainer.global_step == reached
    # the one before is still there, and still the last one
    assert {p.name for p in tmp_path.iterdir()} == {f"step={failing - 1}.ckpt", "last.ckpt"}
    assert os.readlink(tmp_path / "last.ckpt") == f"step={failing - 1}.ckpt"


@pytest.mark.usefixtures("slow_writes")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_exception_waits_for_what_is_being_written(tiny_model: str, task: str, tmp_path: Path) -> None:
    class Fail(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            if trainer.global_step == 1:
                raise KeyError("a bug in a callback")

    module, data, _ = sft(tiny_model, task)
    with pytest.raises(KeyError, match="a bug in a callback"):
        trainer_for(tmp_path, Fail(), every_step(tmp_path), async_checkpoints=True).fit(module, datamodule=data)
    ckpt.check(tmp_path / "step=1.ckpt")


@pytest.mark.usefixtures("slow_writes")
def test_a_save_outside_of_a_fit_is_complete_when_it_returns(tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    trainer = trainer_for(tmp_path, max_steps=1, async_checkpoints=True)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "mine.ckpt")
    ckpt.check(tmp_path / "mine.ckpt")


# ---- what is in it


def test_a_state_that_could_not_be_read_back_is_refused_when_it_is_saved(tiny_model, task: str, tmp_path: Path) -> None:
    class Keeps(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"path": tmp_path}

    module, data, _ = sft(tiny_model, task)
    with pytest.raises(ckpt.CheckpointError, match=r"must consist of numbers, strings, tensors"):
        trainer_for(tmp_path, Keeps(), every_step(tmp_path)).fit(module, datamodule=data)
    assert not list(tmp_path.glob("*.ckpt*"))


def test_skipped_steps_are_counted_on(tiny_model: str, task: str, tmp_path: Path) -> None:
    class Breaks(SFT):
        def loss(self, seqs):
            values, diagnostics = super().loss(seqs)
            return values * (float("nan") if self.trainer.global_step == 1 else 1.0), diagnostics

    counts = []
    for ckpt_path in (None, tmp_path / "step=2.ckpt"):
        _, data, _ = sft(tiny_model, task)
        trainer = trainer_for(tmp_path, every_step(tmp_path), max_steps=3 if ckpt_path else 2)
        trainer.fit(Breaks(tiny_model, optimizer=OPTIMIZER), datamodule=data, ckpt_path=ckpt_path)
        counts.append(float(trainer.callback_metrics["train/skipped_steps"]))
    assert counts == [1.0, 1.0]


def test_weights_alone_are_no_start_for_a_fit(tiny_model: str, task: str, tmp_path: Path) -> None:
    module, data, _ = sft(tiny_model, task)
    trainer = trainer_for(tmp_path, max_steps=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert ckpt.newest([tmp_path]) is None
    with pytest.raises(ValueError, match=r"weights\.ckpt' has weights only \(save_weights_only\): a fit cannot go on"):
        trainer_for(tmp_path).fit(module, datamodule=data, ckpt_path=tmp_path / "weights.ckpt")


# ---- what killed processes leave


def fake(path: Path, age: float) -> Path:
    (path / "dcp").mkdir(parents=True)
    (path / "dcp/.metadata").touch()
    torch.save({"lr_schedulers": []}, path / "meta.pt")
    written = time.time() - age
    os.utime(path / "meta.pt", (written, written))
    return path


def test_the_newest_complete_checkpoint_is_found_whatever_it_is_called(tmp_path: Path) -> None:
    assert ckpt.newest([tmp_path, tmp_path / "nowhere"]) is None
    fake(tmp_path / "a/step=9.ckpt", age=30)
    older = fake(tmp_path / "b/last.ckpt", age=20)
    replaced = fake(tmp_path / "b/final.ckpt.old", age=10)
    fake(tmp_path / "b/next.ckpt.incomplete", age=0)
    (fake(tmp_path / "b/half.ckpt", age=0) / "dcp/.metadata").unlink()
    (tmp_path / "b/link.ckpt").symlink_to("last.ckpt")
    assert ckpt.newest([tmp_path / "a", tmp_path / "b"]) == replaced
    ckpt.delete(replaced)
    assert ckpt.newest([tmp_path / "a", tmp_path / "b"]) == older


def test_the_next_save_tidies_up(tiny_model: str, task: str, tmp_path: Path) -> None:
    left = ("x.ckpt.incomplete", "hpc_ckpt-3.ckpt.incomplete", "y.ckpt.removed")
    for name in (*left, "z.ckpt.old", "last.ckpt.old", "z.ckpt"):
        fake(tmp_path / name, age=1)
    (tmp_path / "notes.old").mkdir()  # not ours
    module, data, _ = sft(tiny_model, task)
    trainer_for(tmp_path, every_step(tmp_path), max_steps=1).fit(module, datamodule=data)
    assert {p.name for p in tmp_path.iterdir()} == {"step=1.ckpt", "last.ckpt", "z.ckpt", "notes.old"}


def test_a_job_that_is_requeued_goes_on_from_a_complete_checkpoint(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path)
    connector = trainer._checkpoint_connector
    ours = fake(tmp_path / "hpc_ckpt_2.ckpt", age=1)
    for suffix in ("incomplete", "removed"):
        fake(ckpt.beside(tmp_path / "hpc_ckpt_3.ckpt", suffix), age=0)
    assert connector._hpc_resume_path == str(ours)
    assert connector.hpc_save_path(str(tmp_path)) == str(tmp_path / "hpc_ckpt_3.ckpt")
    os.replace(ours, ckpt.beside(ours, "old"))  # killed while it was being replaced: `locate` finds it
    assert ckpt.is_complete(ckpt.locate(Path(str(connector._hpc_resume_path))))


def test_last_is_the_newest_checkpoint_of_all_runs_of_the_directory(tiny_model: str, task: str, tmp_path: Path) -> None:
    def fit(steps: int) -> L.Trainer:
        module, data, _ = sft(tiny_model, task)
        trainer = trainer_for(tmp_path, kind=Trainer, logger=None, max_steps=steps)
        trainer.fit(module, datamodule=data, ckpt_path="last")
        return trainer

    assert fit(1).ckpt_path is None  # so a job that may be started again can always say it
    first = tmp_path / "version_0/checkpoints"
    assert fit(2).ckpt_path == next(first.glob("*.ckpt"))
    second = next((tmp_path / "version_1/checkpoints").glob("*.ckpt"))
    os.replace(second, second.with_name(f"{second.name}.old"))  # killed while it was being replaced
    assert fit(3).global_step == 3
    third = ckpt.newest([tmp_path / "version_2/checkpoints"])
    assert third is not None
    assert ckpt.read_meta(third)["global_step"] == 3
    requeued = tmp_path / "hpc_ckpt_1.ckpt"  # what Lightning calls that of a SLURM job which is to start again
    os.replace(third, requeued)
    assert fit(4).ckpt_path == requeued
    module, data, _ = sft(tiny_model, task)
    with pytest.raises(
        ValueError, match="--ckpt_path last: no complete checkpoint of a run was found in '.*elsewhere'"
    ):
        trainer_for(tmp_path / "elsewhere", kind=Trainer).validate(module, datamodule=data, ckpt_path="last")
