"""Every run ends with a checkpoint: on Ctrl-C, on SIGTERM, after too many non-finite steps, and between two others."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_info

from rl2lightning.types import NonFiniteError, RolloutError


class Preemption(L.Callback):
    """The first SIGINT or SIGTERM, on whichever process, lets the step end, saves `interrupted.ckpt` and ends the fit.

    A second Ctrl-C stops at once, as does the first signal before training has begun: there is nothing to save then.
    Calls of environments and rewards that have begun are waited for even so; a third kills the process.
    The command line exits with 128 + the signal's number.

    Under SLURM the signal that asks for a requeue (`--signal=SIGUSR1@90`) waits for the end of the step, too; then
    Lightning saves and requeues.

    A fit whose last step no ModelCheckpoint saved leaves `final.ckpt`.

    Args:
        enabled: false leaves signals to Lightning.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.received: int = 0  # number of the signal, the same on every process once the fit has ended
        self._previous: dict[int, Any] = {}
        self._requeue: int | None = None  # SLURM's signal
        self._training = False
        self._stopping = False  # on every process alike
        self._limit_val_batches: int | float | None = None

    def on_sanity_check_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._install(trainer)

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._install(trainer)
        self._training = True

    def _install(self, trainer: L.Trainer) -> None:
        if not self._previous:
            self.received, self._stopping = 0, False
        # only the main thread may; and not before Lightning has installed its own handlers, which send to the others
        # from within, in the middle of whatever they are doing
        if not self.enabled or self._previous or threading.current_thread() is not threading.main_thread():
            return
        environment = trainer.strategy.cluster_environment  # type: ignore[attr-defined]
        requeue = isinstance(environment, SLURMEnvironment) and environment.auto_requeue
        self._requeue = environment.requeue_signal if requeue else None
        for number in (signal.SIGINT, signal.SIGTERM, *([self._requeue] if self._requeue else [])):
            self._previous[number] = signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == self._requeue:
            self.received = self.received or number
            return
        again = number == signal.SIGINT and self.received in (signal.SIGINT, signal.SIGTERM)
        if again:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # what is on its way out may wait for a thread that hangs
            rank_zero_info(
                "\nstopping now, after calls of environments and rewards that have begun; Ctrl-C does not wait"
            )
        if again or not self._training:
            raise SystemExit(128 + number)
        self.received = number
        rank_zero_info("\nstopping after this step; press Ctrl-C again to stop at once")

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._stop_if_told(trainer)

    def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        if self._training:  # the next step may begin with a long rollout
            self._stop_if_told(trainer)

    def _stop_if_told(self, trainer: L.Trainer) -> None:
        if not self.enabled or self._stopping:
            return
        agreed = self.received
        if trainer.world_size > 1:  # host memory: no wait for the device
            agreed = int(trainer.strategy.max_over_processes(torch.tensor(self.received)))  # type: ignore[attr-defined]
        if agreed == self._requeue:
            if self.received == agreed:  # otherwise one came that is more urgent
                self.received = 0
            with trainer.strategy.saves_at_once():  # type: ignore[attr-defined] - what is requeued is soon killed
                self._previous[agreed](agreed, None)  # Lightning's
        elif agreed:  # a signal that came while waiting for the others is seen after the next step
            self.received = agreed
            path = self._save(trainer, f"signal {signal.Signals(self.received).name}")
            for checkpoint in trainer.checkpoint_callbacks:
                if isinstance(checkpoint, ModelCheckpoint):  # what it saved now would say that the epoch was over
                    checkpoint._last_global_step_saved = trainer.global_step
                    checkpoint._last_checkpoint_saved = checkpoint._last_checkpoint_saved or str(path)
            self._stopping = trainer.should_stop = True
            self._limit_val_batches, trainer.limit_val_batches = trainer.limit_val_batches, 0  # no time to validate

    def on_exception(self, trainer: L.Trainer, pl_module: Any, exception: BaseException) -> None:
        training = self._training  # otherwise there is nothing to save, or the models are not there yet
        self._restore()
        if isinstance(exception, NonFiniteError):  # every process raises it at the same step, so all can save
            self._save(trainer, "non-finite steps")
        elif isinstance(exception, RolloutError) and training and trainer.global_step:
            self._save(trainer, "a rollout that failed")  # every process raises that, too

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._restore()
        checkpoints = trainer.checkpoint_callbacks
        saved = {c._last_global_step_saved for c in checkpoints if isinstance(c, ModelCheckpoint)}
        if checkpoints and not self.received and trainer.global_step not in saved | {0}:
            self._save(trainer, "the run ends between two checkpoints", "final.ckpt")
        if self._limit_val_batches is not None:
            trainer.limit_val_batches, self._limit_val_batches = self._limit_val_batches, None

    def _restore(self) -> None:
        self._training = False
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    def _save(self, trainer: L.Trainer, why: str, name: str = "interrupted.ckpt") -> Path:
        checkpoint = trainer.checkpoint_callback
        directory = checkpoint.dirpath if isinstance(checkpoint, ModelCheckpoint) and checkpoint.dirpath else None
        path = Path(directory or Path(trainer.log_dir or trainer.default_root_dir) / "checkpoints") / name
        trainer.save_checkpoint(path)
        trainer.strategy.wait_for_checkpoint()  # type: ignore[attr-defined]
        rank_zero_info(f"{why}: checkpoint saved to {path}; go on with --ckpt_path {path}")
        return path
