"""Run under torchrun: fits in which the engine of the last process fails; every process writes how each of them ended.

They share their process group, so a process that is left behind in a collective meets the next fit's.
"""

import argparse
import json
import os
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from rl2lightning import GRPO, FSDP2TPStrategy, HFEngine, PromptDataModule, RolloutCallback, SamplingParams
from rl2lightning.types import RolloutError

FAILURES = ["first push", "second push", "wake", "probe", "sleep"]


class FailingEngine(HFEngine):
    """Fails on the last process alone, at one point."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.num_pushes = at, 0

    def fails(self, at: str) -> bool:
        return at == self.at and dist.get_rank() == dist.get_world_size() - 1

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
        if self.num_pushes and self.fails("sleep"):  # after a rollout, not when a run begins
            raise OSError("the cache stays")
        super().sleep()

    def generate(self, prompts, sampling, seeds):
        if self.fails("probe"):
            raise OSError("the device fell off")
        return super().generate(prompts, sampling, seeds)


def outcome(model: str, task: str, failure: str) -> list:
    """How a fit of two steps ended, and after how many of them."""
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(timeout_seconds=30),
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        callbacks=[RolloutCallback(FailingEngine(failure), environment=task)],
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = GRPO(model, sampling=SamplingParams(max_tokens=4), samples_per_prompt=2)
    try:
        trainer.fit(module, datamodule=PromptDataModule(f"prompts@{task}", prompts_per_rollout=4, val_ratio=0.0))
    except RolloutError as error:
        return [str(error), trainer.global_step]
    return ["", trainer.global_step]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("task")
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    outcomes = {failure: outcome(args.model, args.task, failure) for failure in [*FAILURES, "none"]}
    (args.out / f"rank{os.environ.get('RANK', '0')}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main()
