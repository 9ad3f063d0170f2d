from collections.abc import Callable
from functools import partial
from pathlib import Path

import lightning as L
import pytest
from quiet import quiet_trainer

from rl2lightning import GRPO, HFEngine, OptimizerConfig, PromptDataModule
from rl2lightning.types import Completion, SamplingParams


class WatchedEngine(HFEngine):
    """Notes what is done to it."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.fails_at = 0  # `step` of this rollout, counted from 1; 0: never

    def start(self, spec) -> None:
        self.events.append("start")
        super().start(spec)

    def update_weights(self, weights, version: int) -> None:
        self.events.append(f"push {version}")
        super().update_weights(weights, version)

    def wake(self) -> None:
        self.events.append("wake")
        super().wake()

    def step(self) -> list[Completion]:
        if self.fails_at and self.events.count("wake") == self.fails_at:
            raise OSError("the device fell off")
        return super().step()

    def sleep(self) -> None:
        self.events.append("sleep")
        super().sleep()

    def shutdown(self) -> None:
        self.events.append("shutdown")
        super().shutdown()


@pytest.fixture
def engine() -> WatchedEngine:
    return WatchedEngine()


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    return partial(quiet_trainer, tmp_path)


@pytest.fixture
def grpo(tiny_model: str) -> Callable[..., GRPO]:
    def make(**settings) -> GRPO:
        defaults = {
            "optimizer": OptimizerConfig(lr=1e-2, schedule="constant", warmup_ratio=0.0),
            "sampling": SamplingParams(max_tokens=6),
            "samples_per_prompt": 4,
        }
        return GRPO(tiny_model, **(defaults | settings))

    return make


@pytest.fixture
def prompts(task: str) -> Callable[..., PromptDataModule]:
    def make(**settings) -> PromptDataModule:
        return PromptDataModule(f"prompts@{task}", **({"prompts_per_rollout": 4, "val_ratio": 0.0} | settings))

    return make
