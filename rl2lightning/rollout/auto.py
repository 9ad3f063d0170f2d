"""Which engine a run gets that names none."""

from __future__ import annotations

import torch

from rl2lightning.rollout.engine import RolloutEngine
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.rollout.vllm_backend import support
from rl2lightning.rollout.weight_stream import ExpectedWeights


def default_engine(device_type: str, model_path: str | None = None) -> tuple[RolloutEngine, str]:
    """vLLM where it is installed for such a device and such a model, the embedded engine elsewhere; and a line that
    says which."""
    version = support.installed(device_type)
    if version is None:
        package = support.DISTRIBUTIONS.get(device_type, "vllm")
        return HFEngine(), f"rollouts by the embedded engine: {package} is not installed"
    if not support.supported(version):
        return HFEngine(), f"rollouts by the embedded engine: vLLM {version} is installed, 0.26 to 0.32 are supported"
    if model_path is not None:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(model_path)
        problem = support.unsuited(config, ExpectedWeights.of(config).model, torch.device(device_type))
        if problem is not None:
            return HFEngine(), f"rollouts by the embedded engine: {problem}"
    return VLLMEngine(), f"rollouts by vLLM {version}"
