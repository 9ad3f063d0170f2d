"""rl2lightning: post-training language models with Lightning.

Public names are imported on first use, so that `import rl2lightning` stays light.
"""

from __future__ import annotations

import importlib
from typing import Any

from rl2lightning.compat import do_without_companions_for_cuda

__version__ = "0.1.0"

do_without_companions_for_cuda()  # here, because it must come before Lightning is imported

_PUBLIC = {
    "SFT": "algorithms.sft",
    "RM": "algorithms.rm",
    "DPO": "algorithms.dpo",
    "KTO": "algorithms.kto",
    "GRPO": "algorithms.grpo",
    "PPO": "algorithms.ppo",
    "PostTrainingModule": "algorithms.base",
    "OptimizerConfig": "algorithms.optimizer",
    "LoRAConfig": "models.lora",
    "FSDP2TPStrategy": "parallel.strategy",
    "RingAttention": "parallel.ring.plugin",
    "ChatDataModule": "data.datamodules",
    "PreferenceDataModule": "data.datamodules",
    "UnpairedDataModule": "data.datamodules",
    "PromptDataModule": "data.datamodules",
    "RolloutCallback": "callbacks.rollout",
    "CriticWarmup": "callbacks.critic_warmup",
    "Samples": "callbacks.samples",
    "Throughput": "callbacks.throughput",
    "Preemption": "callbacks.preemption",
    "HFEngine": "rollout.hf",
    "VLLMEngine": "rollout.vllm",
    "RolloutEngine": "rollout.engine",
    "Environment": "environments.base",
    "ScriptEnvironment": "environments.script",
    "ToolEnvironment": "environments.tools",
    "Reward": "rewards.base",
    "FunctionReward": "rewards.base",
    "SamplingParams": "types",
    "StructuredOutput": "types",
    "PartialRollouts": "rollout.partial",
    "Sequences": "types",
    "Trajectory": "types",
    "Trainer": "cli",
    "export": "export",
}

__all__ = ["__version__", *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'rl2lightning' has no attribute '{name}'")
    return getattr(importlib.import_module(f"rl2lightning.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
