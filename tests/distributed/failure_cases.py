"""Run under torchrun: fits in which the last process alone fails; every process writes how each of them ended.

They share their process group, so a process that is left behind in a collective meets the next fit's.
"""

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from quiet import quiet_trainer

from rl2lightning import (
    GRPO,
    SFT,
    ChatDataModule,
    FSDP2TPStrategy,
    HFEngine,
    PromptDataModule,
    RolloutCallback,
    SamplingParams,
    cli,
)
from rl2lightning.callbacks.generation import succeed_together

FAILURES = ["start", "first sleep", "first push", "second push", "offload", "wake", "probe", "sleep", "reload"]


def on_last_process() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


class FailingEngine(HFEngine):
    """Fails on the last process alone, at one point."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.num_pushes = at, 0

    def fails(self, at: str) -> bool:
        return at == self.at and on_last_process()

    def start(self, spec) -> None:
        if self.fails("start"):
            raise MemoryError("no room for the weights")
        super().start(spec)

    def update_weights(self, weights, version: int) -> None:
        fails = self.fails("second push" if self.num_pushes else "first push")
        self.num_pushes += 1
        # a weight of no use half way, where the others go on gathering
        stream = ((n, w[:0]) if fails and i == 3 else (n, w) for i, (n, w) in enumerate(weights))
        super().update_weights(stream, version)

    def wake(self) -> None:
        if self.fails("wake"):
            raise MemoryError("no room for the cache")
        super().wake()

    def sleep(self) -> None:
        if self.fails("sleep" if self.num_pushes else "first sleep"):  # after a rollout, or when a run begins
            raise OSError("the cache stays")
        super().sleep()

    def generate(self, prompts, sampling, seeds):
        if self.fails("probe"):
            raise OSError("the device fell off")
        return super().generate(prompts, sampling, seeds)


class FailingStrategy(FSDP2TPStrategy):
    """Has no room on the last process alone, on the way to the host or back."""

    def __init__(self, at: str) -> None:
        super().__init__(timeout_seconds=30)
        self.at, self.away = at, False

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        if self.at == "offload" and on_last_process():
            raise MemoryError("no room on the host")
        self.away = True
        with super().offloaded():
            yield
        self.away = False
        if self.at == "reload" and on_last_process():
            raise MemoryError("no room on the device")


def outcome(root: Path, model: str, task: str, failure: str) -> list:
    """How a fit of two steps ended, after how many of them, and whether tensors were left in host memory."""
    strategy = FailingStrategy(failure)
    devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rollouts = RolloutCallback(FailingEngine(failure), environment=task)
    trainer = quiet_trainer(root, rollouts, strategy=strategy, devices=devices, max_steps=2)
    module = GRPO(model, sampling=SamplingParams(max_tokens=4), samples_per_prompt=2)
    said = ""
    try:
        trainer.fit(module, datamodule=PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, val_ratio=0.0))
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    return [said, trainer.global_step, strategy.away]


def steps_with_a_lagging_file_system(root: Path, model: str, task: str) -> list[int]:
    """Steps that a run makes which goes on from the last checkpoint, of which the last process sees nothing yet."""

    def fit(max_steps: int, ckpt_path: str | None = None) -> int:
        devices = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        strategy = FSDP2TPStrategy(timeout_seconds=30)
        trainer = cli.Trainer(
            default_root_dir=root,
            strategy=strategy,
            accelerator="cpu",
            devices=devices,
            max_steps=max_steps,
            logger=False,
            enable_progress_bar=False,
        )
        module = SFT(model)
        data = ChatDataModule(f"conversations@{task}", batch_size=4, val_ratio=0.0)
        begun: list[int] = []
        module.on_train_start = lambda: begun.append(trainer.global_step)
        trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
        return trainer.global_step - begun[0]

    steps = [fit(3)]
    if on_last_process():
        cli.newest = lambda directories: None
    return [*steps, fit(5, "last")]


def unheard_failure() -> str:
    """How a failure ends where the others are inside a collective of somebody else's; no group works after this."""
    somebody_elses = dist.new_group(backend="gloo")

    def fn() -> None:
        if on_last_process():
            raise MemoryError("no room for the cache")
        dist.barrier(group=somebody_elses)

    try:
        succeed_together(fn, patience=timedelta(seconds=1))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    outcomes = {failure: outcome(args.out, args.model, args.task, failure) for failure in [*FAILURES, "none"]}
    outcomes["lagging"] = steps_with_a_lagging_file_system(args.out / "run", args.model, args.task)
    outcomes["unheard"] = unheard_failure()
    (args.out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
