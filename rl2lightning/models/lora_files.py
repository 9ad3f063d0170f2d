"""Adapters outside of models: merged into weights, and as directories in peft's format."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"  # as peft names them
NAME = "default"  # peft's name of the one adapter there is
PREFIX = "base_model.model."  # of the names in its files
_BASE_FILE = "base_fingerprint.txt"  # of the frozen weights, beside the config
_SAMPLE = 64  # numbers of each weight in a fingerprint


def merge(weight: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
    """weight [out, in] + scaling * up [out, rank] @ down [rank, in], summed in fp32, in the weight's own type."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scaling).to(weight.dtype)


def scaling(config: Mapping[str, Any]) -> float:
    """What the product B A is multiplied by, from the content of a peft config."""
    rank = config["r"]
    return config["lora_alpha"] / (math.sqrt(rank) if config.get("use_rslora") else rank)


def merge_files(base: dict[str, Tensor], adapter: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Whole weights of the frozen model and those of an adapter under peft's names, as one model's."""
    trained = {name.removeprefix(PREFIX): x for name, x in adapter.items()}
    merged = dict(base)
    for name, x in trained.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            up = trained[f"{layer}.lora_B.weight"]
            merged[f"{layer}.weight"] = merge(base[f"{layer}.weight"], x, up, scaling(config))
        elif not name.endswith(".lora_B.weight"):
            merged[name] = x
    return merged


def file_name(name: str) -> str:
    """What a parameter that learns is called in peft's files."""
    return PREFIX + name.replace(f".modules_to_save.{NAME}.", ".").replace(f".{NAME}.", ".")


def plain_config(config: Any) -> dict[str, Any]:
    """The content of a peft config's file."""
    return {name: sorted(x) if isinstance(x, set) else x for name, x in config.to_dict().items()}


def write_config(config: dict[str, Any], directory: Path, *, base: str | None = None) -> None:
    """peft's description of an adapter, beside which its weights belong, and which frozen weights it is on."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    if base is not None:
        (directory / _BASE_FILE).write_text(base + "\n")


def read_config(directory: Path) -> dict[str, Any]:
    file = directory / CONFIG_FILE
    if not file.is_file():
        raise ValueError(f"'{directory}' is no adapter's directory: it has no {CONFIG_FILE}")
    return json.loads(file.read_text())


def read_base(directory: Path) -> str | None:
    """The fingerprint of the weights that a checkpoint's adapter was trained on; None in those of version 0.1.0."""
    file = directory / _BASE_FILE
    return file.read_text().strip() if file.is_file() else None


def fingerprint(directory: str) -> str:
    """What tells the weights of one model directory from another's: a digest of the first numbers of each.

    The same for any division into files, and for a type that holds the same numbers.
    """
    from safetensors import safe_open

    found: list[tuple[str, bytes]] = []
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dictionary
                part = stored.get_slice(name)
                first = part[:1] if part.get_shape() else stored.get_tensor(name)
                found.append((name, first.flatten()[:_SAMPLE].float().numpy().tobytes()))
    digest = hashlib.blake2b(digest_size=16)
    for name, numbers in sorted(found):
        digest.update(name.encode() + b"=" + numbers)
    return digest.hexdigest()


def write_adapter(weights: dict[str, Tensor], config: dict[str, Any], directory: Path) -> None:
    """An adapter's directory, which `PeftModel.from_pretrained` loads."""
    from safetensors.torch import save_file

    write_config(config, directory)
    contiguous = {name: x.contiguous() for name, x in weights.items()}
    save_file(contiguous, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    shutil.copymode(directory / CONFIG_FILE, directory / WEIGHTS_FILE)  # safetensors writes for its owner alone
