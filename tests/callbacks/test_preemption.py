"""A run that is told to stop ends its step, leaves a checkpoint, and goes on from there as if nothing had been."""

import csv
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from quiet import quiet_trainer

from rl2lightning import GRPO, Preemption, PromptDataModule, RolloutCallback, SamplingParams
from rl2lightning.cli import CLI
from rl2lightning.parallel.checkpoint import newest

COMMON = [
    "--model=rl2lightning.GRPO",
    "--model.optimizer={lr: 1.0e-3, schedule: constant, warmup_ratio: 0.0}",
    "--model.sampling.max_tokens=4",
    "--model.samples_per_prompt=2",
    "--data=rl2lightning.PromptDataModule",
    "--data.prompts_per_rollout=2",
    "--data.val_ratio=0.0",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.callbacks+=RolloutCallback",
    "--samples.save_rollouts=true",
]


@pytest.fixture(autouse=True)
def _ctrl_c_as_in_a_terminal() -> Iterator[None]:
    """A shell starts jobs in the background with SIGINT ignored, and their children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def arguments(model: str, task: str, root: Path, *more: str) -> list[str]:
    own = [f"--model.model={model}", f"--data.path=prompts@{task}", f"--trainer.default_root_dir={root}"]
    return ["fit", *COMMON, *own, f"--trainer.callbacks.environment={task}", *more]


def rollouts(run: Path) -> dict[int, str]:
    """What was generated in each training step, to the letter."""
    return {int(p.name[10:16]): p.read_text() for p in run.glob("rollouts/train-step*")}


def test_ctrl_c_leaves_a_checkpoint_from_which_the_run_goes_on(
    tiny_model: str, task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "runs/version_0"
    command = arguments(tiny_model, task, tmp_path / "runs", "--trainer.max_steps=100000")
    with subprocess.Popen(
        [sys.executable, "-m", "rl2lightning", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            deadline = time.monotonic() + 120
            while len(rollouts(run)) < 3:
                assert process.poll() is None, process.stdout.read().decode()[-4000:]
                assert time.monotonic() < deadline
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            output = process.communicate(timeout=60)[0].decode()
        finally:
            process.kill()  # where it did not stop
    assert process.returncode == 130, output[-4000:]
    assert "Traceback" not in output
    path = run / "checkpoints/interrupted.ckpt"
    assert f"go on with --ckpt_path {path}" in output
    done = rollouts(run)
    step = torch.load(path / "meta.pt", weights_only=True)["global_step"]
    assert sorted(done) == list(range(1, step + 1))

    monkeypatch.setattr(sys, "argv", ["rl2lightning"])
    limit = f"--trainer.max_steps={step + 3}"
    with pytest.warns(UserWarning, match="The dirpath has changed"):
        CLI(arguments(tiny_model, task, tmp_path / "runs", limit, f"--ckpt_path={path}"))
    CLI(arguments(tiny_model, task, tmp_path / "whole", limit))
    resumed, whole = rollouts(tmp_path / "runs/version_1"), rollouts(tmp_path / "whole/version_0")
    assert done | resumed == whole
    assert sorted(resumed) == [step + 1, step + 2, step + 3]
    assert len(set(whole.values())) == step + 3


class Send(L.Callback):
    """Sends this process a signal in the middle of a step."""

    def __init__(self, number: int, step: int) -> None:
        self.number, self.step = number, step

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.number)


def varied(trajectory) -> float:
    return float(trajectory.sample_id)


@pytest.mark.parametrize("every_n_train_steps", [None, 1, 100])
def test_the_checkpoint_of_an_interrupted_epoch_is_the_newest_and_the_epoch_goes_on(
    make_trainer, grpo, prompts, tmp_path: Path, every_n_train_steps: int | None
) -> None:
    def trainer(directory: str, *callbacks: L.Callback) -> L.Trainer:
        saves = ModelCheckpoint(tmp_path / directory, save_last=True, every_n_train_steps=every_n_train_steps)
        settings = {"max_steps": -1, "max_epochs": 1, "enable_checkpointing": True}
        return make_trainer(*callbacks, Preemption(), RolloutCallback(rewards=[varied]), saves, **settings)

    interrupted = trainer("checkpoints", Send(signal.SIGTERM, 1))
    interrupted.fit(grpo(), datamodule=prompts())
    assert interrupted.global_step == 2
    path = newest([tmp_path / "checkpoints"])
    assert path is not None
    assert path.name == "interrupted.ckpt"
    rest = trainer("resumed")
    with pytest.warns(UserWarning, match="The dirpath has changed"):
        rest.fit(grpo(), datamodule=prompts(), ckpt_path=path)
    assert rest.global_step == rest.num_training_batches > 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_fit_after_its_step(make_trainer, grpo, prompts, tmp_path: Path, number: int) -> None:
    before = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    preemption = Preemption()
    trainer = make_trainer(Send(number, 1), preemption, RolloutCallback(rewards=[varied]), max_steps=10)
    trainer.fit(grpo(), datamodule=prompts())
    assert trainer.global_step == 2
    assert preemption.received == number
    meta = torch.load(tmp_path / "checkpoints/interrupted.ckpt/meta.pt", weights_only=True)
    assert meta["global_step"] == 2
    assert {n: signal.getsignal(n) for n in before} == before


def test_a_signal_during_validation_needs_no_further_step(make_trainer, grpo, prompts, tmp_path: Path) -> None:
    class SendInValidation(L.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    settings = {"max_steps": 10, "val_check_interval": 3, "num_sanity_val_steps": 0, "limit_val_batches": 1}
    preemption = Preemption()
    callbacks = SendInValidation(), preemption, RolloutCallback(rewards=[varied])
    trainer = make_trainer(*callbacks, **settings)
    trainer.fit(grpo(), datamodule=prompts(val_ratio=0.1))
    assert (trainer.global_step, preemption.received) == (3, signal.SIGTERM)
    meta = torch.load(tmp_path / "checkpoints/interrupted.ckpt/meta.pt", weights_only=True)
    assert meta["global_step"] == 3


def test_a_signal_before_training_ends_the_run_at_once(make_trainer, grpo, prompts, tmp_path: Path) -> None:
    class SendInSanityCheck(L.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(SendInSanityCheck(), Preemption(), RolloutCallback(rewards=[varied]), limit_val_batches=1)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as raised:
        trainer.fit(grpo(), datamodule=prompts(val_ratio=0.1))
    assert raised.value.code == 143
    assert not (tmp_path / "checkpoints").exists()
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_ctrl_c_stops_at_once_and_a_third_would_kill(make_trainer, grpo, prompts, tmp_path: Path) -> None:
    handlers = []

    class Look(L.Callback):
        def on_exception(self, trainer, pl_module, exception) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))

    sends = Send(signal.SIGINT, 1), Send(signal.SIGINT, 1)
    trainer = make_trainer(*sends, Look(), Preemption(), RolloutCallback(rewards=[varied]), max_steps=10)
    with pytest.raises(SystemExit) as raised:
        trainer.fit(grpo(), datamodule=prompts())
    assert raised.value.code == 130
    assert handlers == [signal.SIG_DFL]
    assert trainer.global_step == 1
    assert not (tmp_path / "checkpoints").exists()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_without_preemption_signals_are_left_to_lightning(make_trainer, grpo, prompts) -> None:
    handlers = []

    class Look(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
            handlers.append(signal.getsignal(signal.SIGINT))

    make_trainer(Preemption(enabled=False), Look(), RolloutCallback(rewards=[varied])).fit(grpo(), datamodule=prompts())
    assert handlers == [signal.default_int_handler]


def test_a_signal_that_comes_while_waiting_for_the_others_is_not_forgotten() -> None:
    preemption = Preemption()

    class Strategy:
        def max_over_processes(self, x):
            preemption.received = 15  # the handler runs while this process waits
            return x

    trainer = SimpleNamespace(world_size=2, strategy=Strategy())
    preemption.on_train_batch_end(trainer, None, None, None, 0)  # nobody had one when they were asked
    assert preemption.received == 15  # so the next step sees it


def test_a_run_that_ends_between_two_checkpoints_leaves_one(tiny_model: str, task: str, tmp_path: Path) -> None:
    def fit(every: int) -> list[str]:
        checkpoints = ModelCheckpoint(every_n_train_steps=every, filename="{step}", dirpath=tmp_path / str(every))
        callbacks = [Preemption(), checkpoints, RolloutCallback(environment=task)]
        options = {"max_steps": 3, "limit_val_batches": 0, "enable_checkpointing": True}
        trainer = quiet_trainer(tmp_path, *callbacks, **options)
        data = PromptDataModule(f"prompts@{task}", prompts_per_rollout=2)
        trainer.fit(GRPO(tiny_model, sampling=SamplingParams(max_tokens=3), samples_per_prompt=2), datamodule=data)
        return sorted(path.name for path in (tmp_path / str(every)).iterdir())

    assert fit(2) == ["final.ckpt", "step=2.ckpt"]
    assert fit(3) == ["step=3.ckpt"]


@pytest.mark.parametrize("num_steps", [3, 4, 7])
@pytest.mark.parametrize("limits", [{"max_epochs": -1}, {"max_epochs": 4}, {"max_epochs": 4, "limit_val_batches": 0}])
def test_what_goes_on_from_the_last_checkpoint_counts_steps_and_epochs_on(
    make_trainer, grpo, prompts, tmp_path: Path, num_steps: int, limits: dict[str, int]
) -> None:
    def columns(max_steps: int, ckpt_path: Path | None = None) -> list[tuple[int, int]]:
        logger = CSVLogger(tmp_path, name="", version=max_steps)
        callbacks = Preemption(), ModelCheckpoint(tmp_path / "saved", every_n_train_steps=100)
        options = {"limit_train_batches": 2, "log_every_n_steps": 1, "enable_checkpointing": True, "logger": logger}
        options |= limits
        trainer = make_trainer(*callbacks, RolloutCallback(rewards=[varied]), max_steps=max_steps, **options)
        trainer.fit(grpo(), datamodule=prompts(), ckpt_path=ckpt_path)
        with Path(logger.log_dir, "metrics.csv").open() as file:
            return [(int(row["step"]), int(row["epoch"])) for row in csv.DictReader(file)]

    epochs = [(step, step // 2) for step in range(8)]  # of two steps each
    assert columns(num_steps) == epochs[:num_steps]
    with pytest.warns(UserWarning, match="exists and is not empty"):
        assert columns(8, tmp_path / "saved/final.ckpt") == epochs[num_steps:]
