"""Hugging Face models: found, built without memory, filled by reading only the slices a rank owns, and written back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from rl2lightning.models.packed import PACKED_ATTENTION, register_packed_attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


def resolve_model(path: str, *, weights: bool = True) -> str:
    """The local directory of a model: `path` itself, or the hub's snapshot of that name (downloaded if need be)."""
    if os.path.isdir(path):
        if not (Path(path) / "config.json").is_file():
            raise ValueError(f"model directory '{path}' has no config.json; set model.init_args.model to a model's own")
        if weights and not any(Path(path).glob("*.safetensors")):
            raise ValueError(
                f"model directory '{path}' has no *.safetensors weights; "
                "convert them, or train from random weights with model.init_args.random_init: true"
            )
        return path
    if os.path.isfile(path) or path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ValueError(f"model '{path}' is not a directory; set model.init_args.model to a directory or a hub name")
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "*.jinja", "tokenizer*", "*.model", "*.txt", *(["*.safetensors"] if weights else [])]
    try:
        return snapshot_download(path, allow_patterns=patterns)
    except Exception as error:
        raise ValueError(f"model '{path}' is no directory here and could not be had from the hub: {error}") from error


def load_config(path: str) -> PretrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path)


@contextmanager
def meta_parameters() -> Iterator[None]:
    """Parameters made inside take no memory; buffers stay real (a rotary table on meta could not be made again)."""
    register = nn.Module.register_parameter

    def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and type(param) is nn.Parameter and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build_causal_lm(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A causal LM with meta parameters and packed attention."""
    from transformers import AutoModelForCausalLM

    register_packed_attention()
    with meta_parameters():
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=PACKED_ATTENTION)


def decoder_blocks(lm: PreTrainedModel) -> list[nn.Module]:
    """The transformer layers: the units of sharding and of activation checkpointing."""
    layers = lm.base_model.layers
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def materialize(lm: PreTrainedModel, device: torch.device, *, buffers: torch.device | None = None) -> None:
    """Memory for the (sharded) parameters, uninitialised; buffers to theirs or the same device; ties tied again."""
    for module in lm.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                empty = torch.empty_like(p, device=device)
                module._parameters[name] = nn.Parameter(empty, requires_grad=p.requires_grad)
        for name, b in module._buffers.items():
            if b is not None:
                module._buffers[name] = b.to(buffers or device)
    if is_tied(lm):
        lm.get_output_embeddings().weight = lm.get_input_embeddings().weight  # type: ignore[union-attr]


def is_tied(lm: PreTrainedModel) -> bool:
    return bool(getattr(lm.config.get_text_config(), "tie_word_embeddings", False))


def load_weights(lm: PreTrainedModel, directory: str) -> None:
    """Fills the parameters from *.safetensors, each rank reading only its slices, cast to the parameters' type."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    state = {name: p.detach() for name, p in lm.named_parameters()}  # tied weights once
    stored = HuggingFaceStorageReader(directory).read_metadata().state_dict_metadata
    _check_stored(lm, {name: getattr(item, "size", None) for name, item in stored.items()}, directory)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(directory))


def _check_stored(lm: PreTrainedModel, shapes: dict[str, Any], directory: str) -> None:
    """Whether a directory's weights are those of the model, before any of them is read."""
    kind = type(lm).__name__
    hint = "it may hold another architecture than its config.json names"
    parameters = dict(lm.named_parameters())
    if missing := sorted(set(parameters) - set(shapes)):
        raise ValueError(f"'{directory}' lacks {len(missing)} of the weights of {kind}, such as '{missing[0]}'; {hint}")
    if odd := sorted(name for name, p in parameters.items() if p.shape != shapes[name]):
        raise ValueError(
            f"'{odd[0]}' has the shape {list(shapes[odd[0]])} in '{directory}' and {list(parameters[odd[0]].shape)} in "
            f"{kind}; {hint}"
        )
    if unused := sorted(set(shapes) - set(lm.state_dict())):
        from lightning.pytorch.utilities import rank_zero_warn

        rank_zero_warn(f"'{directory}' holds {len(unused)} weights that {kind} has no place for, such as '{unused[0]}'")


def init_weights(lm: PreTrainedModel, config: PretrainedConfig, seed: int) -> None:
    """Random weights, the same on any mesh: every rank draws the whole model on the CPU and keeps its slices."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    source = dict(whole.named_parameters())
    for name, p in lm.named_parameters():
        full = source[name].detach().to(p.device, p.dtype)
        if isinstance(p, DTensor):
            full = distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)
        p.detach().copy_(full)


def full_weights(lm: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of every parameter, tied ones once, gathered one at a time: all ranks must iterate.

    Cast before the gather, which halves its traffic where the masters are fp32. Every tensor belongs to the receiver.
    """
    for name, p in lm.named_parameters():
        weight = p.detach() if dtype is None else p.detach().to(dtype)
        yield name, weight.full_tensor() if isinstance(weight, DTensor) else weight


def copy_generation_config(source: str | Path, directory: str | Path) -> None:
    """Takes along what a model says of its own generation, above all all of its end-of-sequence tokens."""
    file = Path(source) / "generation_config.json"
    if file.is_file():
        shutil.copyfile(file, Path(directory) / file.name)


def save_pretrained(
    config: PretrainedConfig, state: dict[str, Tensor], directory: str, *, tokenizer: Any = None
) -> None:
    """Writes a model directory that `from_pretrained` loads: config, safetensors (sharded when large), tokenizer."""
    from transformers import AutoModelForCausalLM

    with meta_parameters():
        shell = AutoModelForCausalLM.from_config(config, dtype=next(iter(state.values())).dtype)
    shell.save_pretrained(directory, state_dict=state)
    for file in Path(directory).glob("*.safetensors"):  # safetensors writes them for their owner alone
        shutil.copymode(Path(directory) / "config.json", file)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
