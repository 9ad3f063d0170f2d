"""Hugging Face models: found, built without memory, filled by reading only the slices a rank owns, and written back."""

from __future__ import annotations

import copy
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from rl2lightning.models.heads import SCALAR_HEAD, ScalarHead
from rl2lightning.models.packed import PACKED_ATTENTION, register_packed_attention
from rl2lightning.types import counted, refuse_misplaced

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


def resolve_model(path: str, *, weights: bool = True) -> str:
    """The local directory of a model: `path` itself, or the hub's snapshot of that name (downloaded if need be)."""
    if os.path.isdir(path):
        refuse_misplaced(path)
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


def unlike_token(tokenizer: PreTrainedTokenizerBase, path: str) -> str | None:
    """A token that the tokenizer of a model, a directory or hub name, numbers otherwise than `tokenizer` does.

    None where there is no such token, or a directory without a tokenizer.
    """
    from transformers import AutoTokenizer

    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    if os.path.isdir(path) and not any((Path(path) / name).is_file() for name in files):
        return None
    theirs = AutoTokenizer.from_pretrained(path).get_vocab()
    numbered = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return next((token for token, number in numbered if theirs.get(token, number) != number), None)


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


def build_scalar_lm(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The same with one number per position on top: transformers' sequence classification, with our own head."""
    register_packed_attention()
    with meta_parameters():
        lm = _scalar_class(config).from_config(scalar_config(config), dtype=dtype, attn_implementation=PACKED_ATTENTION)
        lm.score = ScalarHead(lm.config.get_text_config().hidden_size, 1, bias=False, dtype=dtype)
    return lm


def scalar_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of a model with a scalar head; engines would squash the output of anything but a regression."""
    config = copy.deepcopy(config)
    config.num_labels, config.problem_type = 1, "regression"
    return config


def _scalar_class(config: PretrainedConfig) -> Any:
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, AutoModelForSequenceClassification

    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise ValueError(
            f"'{config.model_type}' models have no form for sequence classification, as which a scalar head is saved; "
            "choose a model of another family"
        )
    return AutoModelForSequenceClassification


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
    head = lm.get_output_embeddings()
    if head is not None and is_tied(lm):
        head.weight = lm.get_input_embeddings().weight  # type: ignore[union-attr]


def is_tied(lm: PreTrainedModel) -> bool:
    return bool(getattr(lm.config.get_text_config(), "tie_word_embeddings", False))


def load_weights(
    lm: PreTrainedModel,
    directory: str,
    *,
    optional: Collection[str] = (),
    superfluous: Collection[str] = (),
    parameters: Mapping[str, Tensor] | None = None,
) -> set[str]:
    """Fills the parameters from *.safetensors, each rank reading only its slices, cast to the parameters' type.

    Args:
        lm: a materialised model.
        directory: where the files are.
        optional: parameters that the files may lack.
        superfluous: stored weights that nobody need be told are not used.
        parameters: what to fill, by the names in the files; None: all parameters of the model, by their own.

    Returns:
        the optional parameters that were not there, and are as they were.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    parameters = dict(lm.named_parameters()) if parameters is None else parameters  # tied weights once
    state = {name: p.detach() for name, p in parameters.items()}
    stored = HuggingFaceStorageReader(directory).read_metadata().state_dict_metadata
    absent = set(optional) - set(stored)
    state = {name: p for name, p in state.items() if name not in absent}
    shapes = {name: getattr(item, "size", None) for name, item in stored.items() if name not in superfluous}
    _check_stored(lm, state, shapes, directory)
    dcp.load(state, storage_reader=HuggingFaceStorageReader(directory))
    return absent


def read_weights(directory: str, names: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
    """All weights of a model directory, or those of some names, whole, one by one."""
    from safetensors import safe_open

    for file in sorted(Path(directory).glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 - not a dictionary
                if names is None or name in names:
                    yield name, stored.get_tensor(name)


def _check_stored(lm: PreTrainedModel, parameters: dict[str, Tensor], shapes: dict[str, Any], directory: str) -> None:
    """Whether a directory's weights are those of the model, before any of them is read."""
    kind = type(lm).__name__
    hint = "it may hold another architecture than its config.json names"
    if missing := sorted(set(parameters) - set(shapes)):
        raise ValueError(f"'{directory}' lacks {len(missing)} of the weights of {kind}, such as '{missing[0]}'; {hint}")
    if odd := sorted(name for name, p in parameters.items() if p.shape != shapes[name]):
        raise ValueError(
            f"'{odd[0]}' has the shape {list(shapes[odd[0]])} in '{directory}' and {list(parameters[odd[0]].shape)} in "
            f"{kind}; {hint}"
        )
    if unused := sorted(set(shapes) - set(parameters) - set(lm.state_dict())):
        from lightning.pytorch.utilities import rank_zero_warn

        number = counted(len(unused), "weight", "weights")
        rank_zero_warn(f"'{directory}' holds {number} that {kind} has no place for, such as '{unused[0]}'")


def init_weights(lm: PreTrainedModel, config: PretrainedConfig, seed: int) -> None:
    """Random weights, the same on any mesh: every rank draws the whole model on the CPU and keeps its slices."""
    from transformers import AutoModelForCausalLM

    scalar = lm.get_output_embeddings() is None
    auto = _scalar_class(config) if scalar else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = auto.from_config(scalar_config(config) if scalar else config, dtype=torch.float32)
    source = dict(whole.named_parameters())
    for name, p in lm.named_parameters():
        fill(p, source[name].detach())


def init_head(lm: PreTrainedModel, seed: int) -> None:
    """A random scalar head, the same on any mesh."""
    weight = lm.get_parameter(SCALAR_HEAD)
    generator = torch.Generator().manual_seed(seed)
    std = lm.config.get_text_config().initializer_range
    fill(weight, std * torch.randn(weight.shape, generator=generator))


def fill(p: Tensor, full: Tensor) -> None:
    """Copies this process's part of a full tensor into a parameter."""
    local = p.to_local() if isinstance(p, DTensor) else p
    local.detach().copy_(own_part(full, p))


def own_part(full: Tensor, p: Tensor) -> Tensor:
    """What of a full tensor this process holds of the parameter `p`.

    Tensor parallelism cuts a weight first and FSDP what is left of it, so the axes of the mesh are taken from the last.
    """
    if not isinstance(p, DTensor):
        return full
    coordinate = p.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(p.device_mesh.ndim)):
        placement: Any = p.placements[axis]
        if not placement.is_replicate():
            parts = full.chunk(p.device_mesh.size(axis), placement.dim)
            nothing = full.narrow(placement.dim, 0, 0)
            full = parts[coordinate[axis]] if coordinate[axis] < len(parts) else nothing
    return full


def full_weights(lm: PreTrainedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """(HF name, full tensor) of every parameter, tied ones once, gathered one at a time: all ranks must iterate.

    Cast before the gather, which halves its traffic where the masters are fp32. Every tensor belongs to the receiver.
    """
    return gathered_weights(dict(lm.named_parameters()), dtype)


def gathered_weights(
    parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Likewise of the parameters given."""
    for name, p in parameters.items():
        yield name, whole(p, dtype)


def whole(p: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A parameter's full tensor; a collective where it is sharded."""
    x = p.detach() if dtype is None else p.detach().to(dtype)
    return gathered(x) if isinstance(x, DTensor) else x


def gathered(x: DTensor) -> Tensor:
    """`x.full_tensor()`, put together axis by axis in the order opposite to the cuts: torch warns of any other."""
    placements = list(x.placements)
    for axis in range(len(placements)):
        placements[axis] = Replicate()
        x = x.redistribute(placements=placements)
    return x.to_local()


def copy_generation_config(source: str | Path, directory: str | Path) -> None:
    """Takes along what a model says of its own generation, above all all of its end-of-sequence tokens."""
    file = Path(source) / "generation_config.json"
    if file.is_file():
        shutil.copyfile(file, Path(directory) / file.name)


def save_pretrained(
    config: PretrainedConfig, state: dict[str, Tensor], directory: str, *, tokenizer: Any = None
) -> None:
    """Writes a model directory that `from_pretrained` loads: config, safetensors (sharded when large), tokenizer.

    Weights with a scalar head become a model for sequence classification with one label.
    """
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    if SCALAR_HEAD in state:
        auto, config = _scalar_class(config), scalar_config(config)
    with meta_parameters():
        shell = auto.from_config(config, dtype=next(x.dtype for name, x in state.items() if name != SCALAR_HEAD))
    # checkpoints have tied weights under both their names, files under one
    doubles = set(shell.state_dict()) - {name for name, _ in shell.named_parameters()}
    shell.save_pretrained(directory, state_dict={name: x for name, x in state.items() if name not in doubles})
    for file in Path(directory).glob("*.safetensors"):  # safetensors writes them for their owner alone
        shutil.copymode(Path(directory) / "config.json", file)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
