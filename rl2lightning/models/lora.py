"""Low-rank adapters (Hu et al., 2021, arXiv:2106.09685) by peft, in models.

A layer W of the frozen model becomes W + scaling * B A, of which only A [rank, in] and B [out, rank] learn. peft makes
the layers and its own format is what is read and written; names here are those of the model without adapters.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rl2lightning.models.build import fill, full_weights, is_tied, whole
from rl2lightning.models.heads import SCALAR_HEAD
from rl2lightning.models.lora_files import (
    CONFIG_FILE,
    NAME,
    PREFIX,
    WEIGHTS_FILE,
    file_name,
    merge,
    read_config,
    scaling,
)
from rl2lightning.models.policy import PackedModel, Policy
from rl2lightning.types import Sequences, counted

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (arXiv:2106.09685) on a frozen model, which is also the reference of KL terms and of DPO.

    Args:
        rank: inner size of the adapters; more learns more, at `rank * (in + out)` parameters a matrix.
        alpha: the adapters' product is multiplied by alpha / rank.
        dropout: of the adapters' inputs while training; old and reference log-probs are scored without. Every process
            draws its own masks, under tensor parallelism for its part of a matrix's outputs.
        target_modules: the matrices that get adapters: all of the transformer (not the output layer), or the last parts
            of their names, such as [q_proj, v_proj].
        modules_to_save: whole modules to train besides, by the last part of their names, such as [lm_head]; the frozen
            ones stay as well.
        rslora: alpha / sqrt(rank) instead (rank-stabilised, arXiv:2312.03732).
        path: directory of an adapter in peft's format to go on from; rank, alpha, rslora and both lists are its own
            then, and another rank or alpha beside it is refused. The reference is the model without it.
    """

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    modules_to_save: list[str] | None = None
    rslora: bool = False
    path: str | None = None

    @property
    def inner_size(self) -> int:
        """The rank, that of `path` where there is one."""
        return self.rank if self.path is None else read_config(Path(self.path))["r"]

    def afresh(self) -> LoRAConfig:
        """The same for another model of the run, such as a critic: a new adapter, and on matrices alone."""
        return replace(self, path=None, modules_to_save=None)

    def __post_init__(self) -> None:
        if self.rank < 1 or self.alpha <= 0:
            raise ValueError(f"lora.rank={self.rank} must be at least 1 and lora.alpha={self.alpha} above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora.dropout={self.dropout} must be at least 0 and below 1")
        if not self.target_modules:
            raise ValueError("lora.target_modules is empty: name matrices, or say 'all-linear'")


class Adapters:
    """The adapters of one model, and what else of it learns."""

    def __init__(self, lm: PreTrainedModel, config: Any, layers: dict[str, Any], copies: dict[str, Any]) -> None:
        self.lm = lm
        self.config = config  # a peft.LoraConfig, as it is written beside the weights
        self.layers = layers  # peft's layers around the matrices of these names
        self.copies = copies  # and around the modules that are trained whole
        self.base: str | None = None  # fingerprint of the frozen weights, once these are read

    @contextmanager
    def off(self) -> Iterator[None]:
        """Inside, the model is the frozen one. Trained parameters stay as they are, as do those that get gradients."""
        switched = [*self.layers.values(), *self.copies.values()]
        before = [layer._disable_adapters for layer in switched]
        for layer in switched:  # peft's own switch also turns `requires_grad` off, which FSDP would remember
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer, disabled in zip(switched, before, strict=True):
                layer._disable_adapters = disabled

    def pair(self, name: str) -> tuple[Any, Any]:
        """The modules A and B of a matrix."""
        layer = self.layers[name]
        return layer.lora_A[NAME], layer.lora_B[NAME]

    def frozen(self) -> dict[str, nn.Parameter]:
        """The parameters of the frozen model, tied ones once, under the names they have without adapters."""
        return {_frozen_name(name): p for name, p in self.lm.named_parameters() if not p.requires_grad}

    def trained(self) -> dict[str, nn.Parameter]:
        """What learns, a scalar head included, under the names it has in peft's files."""
        return {file_name(name): p for name, p in self.lm.named_parameters() if p.requires_grad}

    def start(self, seed: int, path: str | None) -> None:
        """First values, the same on any mesh: B = 0 and a random A, or those of an adapter's directory.

        The frozen weights must be there, of which copies begin as copies.
        """
        generator = torch.Generator().manual_seed(seed)
        for name in self.layers:
            down, up = (module.weight for module in self.pair(name))
            bound = 1 / math.sqrt(down.shape[1])  # as peft draws them
            fill(down, torch.empty(down.shape).uniform_(-bound, bound, generator=generator))
            _local(up).zero_()
        for copied in self.copies.values():
            originals = copied.original_module.parameters()
            for ours, theirs in zip(copied.modules_to_save[NAME].parameters(), originals, strict=True):
                _local(ours).copy_(_local(theirs))  # both cut alike
        if path is not None:
            self._load(path)

    def _load(self, path: str) -> None:
        from safetensors.torch import load_file

        stored, trained = load_file(Path(path) / WEIGHTS_FILE), self.trained()
        head = file_name(SCALAR_HEAD)
        if missing := sorted(set(trained) - set(stored) - {head}):
            number = counted(len(missing), "weight", "weights")
            raise ValueError(f"adapter '{path}' lacks {number} of this model's, such as '{missing[0]}'")
        if unused := sorted(set(stored) - set(trained)):
            raise ValueError(f"adapter '{path}' holds '{unused[0]}', which this model has no place for")
        for name, weight in stored.items():
            if weight.shape != trained[name].shape:
                raise ValueError(
                    f"'{name}' has the shape {list(weight.shape)} in adapter '{path}' and {list(trained[name].shape)} "
                    "in this model: set lora.path to an adapter of model.init_args.model"
                )
            fill(trained[name], weight)


def add_adapters(lm: PreTrainedModel, lora: LoRAConfig, dtype: torch.dtype, *, base: str) -> Adapters:
    """Freezes a model on meta, cut by tensor parallelism or not, and gives it adapters, on meta as well.

    Args:
        lm: the model; a scalar head of it goes on learning.
        lora: which adapters.
        dtype: type of what learns.
        base: the frozen model's directory or name, which files of the adapter name.
    """
    peft = _peft()
    scalar = lm.get_output_embeddings() is None
    stored = None if lora.path is None else _stored_config(lora.path)
    if stored is not None:
        _check_sizes(lora, stored)
        rank_zero_info(f"adapters of '{lora.path}': rank {stored.r}, alpha {stored.lora_alpha:g}")
    in_full = list((lora.modules_to_save if stored is None else stored.modules_to_save) or [])
    config = peft.LoraConfig(
        r=lora.rank if stored is None else stored.r,
        lora_alpha=lora.alpha if stored is None else stored.lora_alpha,
        use_rslora=lora.rslora if stored is None else stored.use_rslora,
        lora_dropout=lora.dropout,
        target_modules=_targets(lm, lora.target_modules) if stored is None else stored.target_modules,
        task_type="SEQ_CLS" if scalar else "CAUSAL_LM",
        base_model_name_or_path=os.path.abspath(base) if os.path.isdir(base) else base,
    )
    with torch.random.fork_rng(devices=[]):  # the values it draws are not used
        peft.inject_adapter_in_model(config, lm, adapter_name=NAME, low_cpu_mem_usage=True)
    modules: list[tuple[str, Any]] = list(lm.named_modules())
    layers = {name: module for name, module in modules if isinstance(module, peft.tuners.lora.LoraLayer)}
    for name, layer in layers.items():
        if not isinstance(layer.base_layer, nn.Linear):
            raise ValueError(f"lora.target_modules names '{name}', which is no matrix; name linear layers alone")
        outputs, inputs = layer.base_layer.weight.shape  # of a matrix that is cut, all of it
        layer.lora_A[NAME] = nn.Linear(inputs, config.r, bias=False, device="meta", dtype=dtype)
        layer.lora_B[NAME] = nn.Linear(config.r, outputs, bias=False, device="meta", dtype=dtype)
    in_full = _whole_modules(lm, [name for name in in_full if name != "score"], layers)
    copies = {name: _copied(lm, name, dtype) for name in in_full}
    if scalar:
        lm.get_parameter(SCALAR_HEAD).requires_grad_()
        lm.score.to(dtype)  # type: ignore[union-attr]
    config.modules_to_save = [*copies, *(["score"] if scalar else [])] or None
    return Adapters(lm, config, layers, copies)


def _peft() -> Any:
    try:
        import peft
    except ModuleNotFoundError as error:
        raise ValueError('model.init_args.lora needs the package peft: pip install "rl2lightning[lora]"') from error
    return peft


def _stored_config(path: str) -> Any:
    """The peft config of an adapter's directory, if it is one that can be trained on and merged here."""
    if not (Path(path) / CONFIG_FILE).is_file() or not (Path(path) / WEIGHTS_FILE).is_file():
        raise ValueError(f"lora.path='{path}' is no directory with {CONFIG_FILE} and {WEIGHTS_FILE}")
    config = _peft().PeftConfig.from_pretrained(path)
    if config.peft_type != "LORA":
        raise ValueError(f"lora.path='{path}' holds a {config.peft_type} adapter; only LORA ones can be gone on from")
    plain: dict[str, Any] = {
        "bias": "none", "use_dora": False, "lora_bias": False, "rank_pattern": {}, "alpha_pattern": {},
        "fan_in_fan_out": False, "target_parameters": None, "layers_to_transform": None,
    }  # fmt: skip
    for setting, value in plain.items():
        if getattr(config, setting, value) not in (value, None):
            raise ValueError(
                f"adapter '{path}' was made with {setting}={getattr(config, setting)}, which is not supported: merge "
                "it into its model and set model.init_args.model to that"
            )
    return config


def _check_sizes(lora: LoRAConfig, stored: Any) -> None:
    """Refuses sizes beside `path` that are not the adapter's; the defaults may not have been asked for."""
    for field, own in (("rank", stored.r), ("alpha", stored.lora_alpha)):
        given = getattr(lora, field)
        if given not in (own, getattr(LoRAConfig, field)):
            raise ValueError(
                f"lora.{field}={given} is not that of the adapter in lora.path='{lora.path}': leave it out, or set it "
                f"to {own}, which training goes on with"
            )


def _targets(lm: PreTrainedModel, names: Literal["all-linear"] | list[str]) -> list[str]:
    """The matrices of the transformer, by the last parts of their names where these mean nothing else."""
    prefix = f"{lm.base_model_prefix}."
    linear = {name for name, m in lm.named_modules() if isinstance(m, nn.Linear) and name.startswith(prefix)}
    if isinstance(names, str):
        if names != "all-linear":
            raise ValueError(f"lora.target_modules='{names}' is neither 'all-linear' nor a list of names")
        names = sorted({name.rpartition(".")[2] for name in linear})
    targets: list[str] = []
    for wanted in names:
        meant = {name for name, _ in lm.named_modules() if f".{name}".endswith(f".{wanted}")}
        if not meant & linear:
            there = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
            raise ValueError(
                f"lora.target_modules names '{wanted}', which is no matrix of {type(lm).__name__}'s transformer; "
                f"there are {there} (an output layer can be trained whole by lora.modules_to_save)"
            )
        targets += [wanted] if meant <= linear else sorted(meant & linear)
    return targets


def _whole_modules(lm: PreTrainedModel, names: list[str], layers: Collection[str]) -> list[str]:
    """Full names of the modules to be trained whole, beside those of the matrices with adapters."""
    found: list[str] = []
    tied = [lm.get_input_embeddings(), lm.get_output_embeddings()] if is_tied(lm) else []
    for wanted in names:
        named = {name: m for name, m in lm.named_modules() if f".{name}".endswith(f".{wanted}")}
        if not any(list(m.parameters()) for m in named.values()):
            raise ValueError(f"lora.modules_to_save names '{wanted}', which is no module of {type(lm).__name__}")
        for name, module in named.items():
            if any(module is one for one in tied):
                raise ValueError(
                    f"lora.modules_to_save names '{name}', whose weight is tied to another layer's and cannot be "
                    "trained apart: leave it out"
                )
            if any(isinstance(p, DTensor) for p in module.parameters()):
                raise ValueError("lora.modules_to_save does not go with tensor parallelism: set strategy.tensor to 1")
        found += [name for name in named if name not in found]
    for name in found:
        inside = [other for other in (*layers, *found) if other.startswith(f"{name}.")]
        if inside or name in layers:
            other = inside[0] if inside else name
            raise ValueError(
                f"lora.modules_to_save names '{name}', and '{other}' learns already: take that out of "
                "lora.target_modules (of 'all-linear' by naming the others) or of lora.modules_to_save"
            )
    return found


def _copied(lm: PreTrainedModel, name: str, dtype: torch.dtype) -> Any:
    """Puts peft's wrapper, which holds the frozen module and a copy that learns, in the place of a module."""
    wrapper = _peft().utils.ModulesToSaveWrapper(lm.get_submodule(name), NAME)
    wrapper.original_module.requires_grad_(False)
    wrapper.modules_to_save[NAME].to(dtype).requires_grad_()
    lm.set_submodule(name, wrapper)
    return wrapper


def _frozen_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _local(p: Tensor) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


# ---- without adapters, and merged


class FrozenBase(Policy):
    """The frozen model under a policy's adapters, as its reference: a policy that holds no weights of its own."""

    policy: Policy

    def __init__(self, policy: Policy) -> None:
        nn.Module.__init__(self)
        # no submodules: their parameters are listed, saved and moved once
        self.__dict__["policy"], self.__dict__["lm"] = policy, policy.lm
        self.pack = policy.pack
        self.adapters = None

    def forward(self, seqs: Sequences, *, temperature: float, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        assert self.policy.adapters is not None
        with self.policy.adapters.off(), torch.no_grad():
            return self.policy(seqs, temperature=temperature, entropy=entropy)

    def train(self, mode: bool = True) -> FrozenBase:
        self.policy.train(mode)
        return super().train(mode)

    def modules(self, *args: Any, **kwargs: Any) -> Iterator[nn.Module]:
        """Those that run."""
        return self.policy.modules(*args, **kwargs)


def merged_weights(model: PackedModel, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """`full_weights` of a model whose adapters are merged into its matrices; the model itself stays as it is."""
    adapters = model.adapters
    if adapters is None:
        yield from full_weights(model.lm, dtype)
        return
    trained = {name.removeprefix(PREFIX): p for name, p in adapters.trained().items()}
    factor = scaling(adapters.config.to_dict())
    for name, p in adapters.frozen().items():
        layer = name.removesuffix(".weight")
        weight = whole(trained.pop(name, p), dtype)
        if layer in adapters.layers:
            down, up = (whole(module.weight) for module in adapters.pair(layer))
            weight = merge(weight, down, up, factor)
        yield name, weight
    if SCALAR_HEAD in trained:
        yield SCALAR_HEAD, whole(trained[SCALAR_HEAD], dtype)
