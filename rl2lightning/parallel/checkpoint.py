"""Checkpoints are directories: complete under their name, or absent.

step=100.ckpt/
    dcp/            model and optimizer shards (torch.distributed.checkpoint), readable on any mesh
    meta.pt         Lightning's loops, callbacks, schedulers and data position; plain types, loaded weights_only
    rank_00000.pt   random states of each process, used again only at the same world size
    model/          config.json and tokenizer, from which `rl2lightning export` makes a model directory
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from rl2lightning.models.policy import PackedModel
from rl2lightning.types import counted


def model_state(model: nn.Module, *, exclude: Sequence[str]) -> dict[str, Any]:
    """Sharded weights by name, without the submodules named in `exclude` (fixed reference models).

    Of a model with adapters, what learns: the rest is in its model directory.
    """
    prefixes = tuple(f"{name}." for name in exclude)
    frozen = {
        f"{name}.{parameter}"
        for name, module in model.named_modules()
        if isinstance(module, PackedModel) and module.adapters is not None
        for parameter, p in module.named_parameters(remove_duplicate=False)
        if not p.requires_grad
    }
    state = get_model_state_dict(model)
    return {name: x for name, x in state.items() if name not in frozen and not name.startswith(prefixes)}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Sharded state by name, of an optimizer that has not stepped yet, too; it is left as it was."""
    fresh = not optimizer.state
    state = get_optimizer_state_dict(model, optimizer)
    if fresh:  # torch has made state by a step with gradients of zero, which must not count
        for of_parameter in optimizer.state.values():
            if isinstance(step := of_parameter.get("step"), Tensor):
                step.zero_()  # the very tensor that `state` holds
    return state


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; raised on every process, whichever of them failed."""


def beside(path: Path, suffix: Literal["incomplete", "old", "removed"]) -> Path:
    """What a checkpoint is called before it is complete, while its successor takes its name, while it is deleted.

    Lightning takes whatever has `ckpt_` in its name for the checkpoint of a job that is requeued, and reads the number
    behind it; `locate` finds one that was being replaced, but nothing can be made of the other two.
    """
    name = path.name if suffix == "old" else path.name.replace("ckpt_", "ckpt-")
    return path.with_name(f"{name}.{suffix}")


def replace(source: Path, target: Path) -> None:
    """Gives `source` the name `target`; killed between the renames, it leaves what was there as `target.old`."""
    aside = beside(target, "old")
    delete(aside)
    if os.path.lexists(target):  # a dangling link, too
        os.replace(target, aside)
    os.replace(source, target)
    delete(aside)


def link(target: Path, name: Path) -> None:
    """Makes `name` a relative symbolic link to `target`, in one step, so that it points somewhere at any time."""
    if name.is_dir() and not name.is_symlink():
        remove(name)  # a checkpoint of a run that did not link
    new = name.with_name(f"{name.name}.link")
    delete(new)
    new.symlink_to(os.path.relpath(target, name.parent))
    os.replace(new, name)


def remove(path: Path, *, successor: Path | None = None) -> None:
    """Renames first, so that a half-deleted checkpoint never looks like a whole one.

    Links beside it that point at it point at `successor` before it goes.
    """
    if path.is_dir() and not path.is_symlink():
        for other in path.parent.iterdir():
            if successor is not None and other.is_symlink() and other.resolve() == path.resolve():
                link(successor, other)
        aside = beside(path, "removed")
        delete(aside)
        os.replace(path, aside)
        path = aside
    delete(path)


def delete(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def tidy(directory: Path) -> None:
    """Clears what killed processes left beside the checkpoints, and gives those that were being replaced their name."""
    for aside in directory.glob("*.ckpt.old"):
        path = aside.with_suffix("")
        if path.exists():
            delete(aside)
        else:
            os.replace(aside, path)
    for left in (*directory.glob("*.ckpt.incomplete"), *directory.glob("*.ckpt.removed")):
        delete(left)


def locate(path: Path) -> Path:
    """`path`, or the checkpoint it was replacing when the process was killed between the two renames."""
    aside = beside(path, "old")
    return aside if aside.is_dir() and not path.exists() else path


def is_complete(path: Path) -> bool:
    return (path / "meta.pt").is_file() and (path / "dcp" / ".metadata").is_file()


def newest(directories: Iterable[Path]) -> Path | None:
    """The complete checkpoint written last in any of the directories, if there is one that a run can go on from."""
    found = [path for d in directories for pattern in ("*.ckpt", "*.ckpt.old") for path in d.glob(pattern)]
    found = [path for path in found if is_complete(path) and not path.is_symlink()]
    for path in sorted(found, key=lambda path: (path / "meta.pt").stat().st_mtime_ns, reverse=True):
        if "lr_schedulers" in read_meta(path):  # not so where only weights were saved
            return path
    return None


def read_meta(path: Path) -> dict[str, Any]:
    """Lightning's part: loops, callbacks, schedulers, data position."""
    return torch.load(path / "meta.pt", map_location="cpu", weights_only=True)


def check(path: Path) -> None:
    """A clear sentence where `path` is not a checkpoint."""
    if not path.exists():
        raise ValueError(f"checkpoint '{path}' does not exist; set --ckpt_path to a *.ckpt directory of a run")
    if not is_complete(path):
        raise ValueError(
            f"'{path}' is not a complete checkpoint (no meta.pt or dcp/.metadata); name another in --ckpt_path"
        )


def load(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, exclude: Sequence[str], rank: int, world: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Restores weights and optimizers in place, on any mesh; returns the rest, and this rank's random states if any."""
    path = locate(path)
    check(path)
    meta = read_meta(path)
    if optimizers and "lr_schedulers" not in meta:
        raise ValueError(f"checkpoint '{path}' has weights only (save_weights_only): a fit cannot go on from it")
    state: dict[str, Any] = {"state_dict": model_state(model, exclude=exclude)}
    for i, optimizer in enumerate(optimizers):
        state[f"optimizer_{i}"] = optimizer_state(model, optimizer)
    _check_names(state["state_dict"], path)
    dcp.load(state, checkpoint_id=str(path / "dcp"))
    set_model_state_dict(model, state["state_dict"], options=StateDictOptions(strict=False))
    for i, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, state[f"optimizer_{i}"])
    file = path / f"rank_{rank:05d}.pt"
    same_world = len(list(path.glob("rank_*.pt"))) == world
    rng = torch.load(file, map_location="cpu", weights_only=True) if same_world else None
    return meta, rng


def _check_names(weights: dict[str, Any], path: Path) -> None:
    """A clear sentence where the checkpoint is of another model than the one it is loaded into."""
    stored = dcp.FileSystemReader(str(path / "dcp")).read_metadata().state_dict_metadata
    models = {name[: name.index(".lm.")] for name in weights if ".lm." in name}
    if models - set(found := _models(stored)) - {"reference"}:
        raise ValueError(
            f"checkpoint '{path}' holds {_listed(found)}, and this module needs {_listed(sorted(models))}: name "
            "another in --ckpt_path, or set model.class_path to the algorithm it was made with (config.yaml of its run)"
        )
    _check_adapters(weights, stored, models, path)
    for name, ours in weights.items():
        theirs = getattr(stored.get(f"state_dict.{name}"), "size", None)
        if theirs is None:
            raise ValueError(
                f"checkpoint '{path}' holds no '{name}': it was made with other settings of the model (a reference is "
                "there only if it was updated then); resume with the settings it was made with"
            )
        if tuple(theirs) != tuple(ours.shape):
            raise ValueError(
                f"'{name}' has the shape {list(theirs)} in checkpoint '{path}' and {list(ours.shape)} in this model: "
                "set model.init_args.model to the model it was made with"
            )
    ours = {f"state_dict.{name}" for name in weights}
    prefixes = tuple(f"state_dict.{model}.lm." for model in models)
    if left := sorted(name for name in stored if name.startswith(prefixes) and name not in ours):
        number = counted(len(left), "weight", "weights")
        raise ValueError(
            f"checkpoint '{path}' holds {number} that this model has no place for, such as "
            f"'{left[0].removeprefix('state_dict.')}': resume with the settings of the model it was made with"
        )


def _check_adapters(weights: dict[str, Any], stored: dict[str, Any], models: Iterable[str], path: Path) -> None:
    """A clear sentence where only one of the two has adapters, or both have, of different ranks."""
    for model in sorted(models):
        ours, theirs = _adapter_rank(weights, f"{model}.lm."), _adapter_rank(stored, f"state_dict.{model}.lm.")
        if ours == theirs:
            continue
        if theirs is None:
            raise ValueError(
                f"checkpoint '{path}' holds a {model} without adapters, and model.init_args.lora.rank is {ours}: leave "
                "model.init_args.lora out, or `rl2lightning export` it and set model.init_args.model to that, without "
                "--ckpt_path"
            )
        here = "model.init_args.lora is not set" if ours is None else f"here they are of rank {ours}"
        raise ValueError(
            f"checkpoint '{path}' holds adapters of rank {theirs} of the {model}, and {here}: set "
            f"model.init_args.lora.rank to {theirs} and the rest of lora as it was then (config.yaml of its run)"
        )


def _adapter_rank(weights: dict[str, Any], prefix: str) -> int | None:
    """Inner size of the adapters among weights or their descriptions; None where there are none."""
    for name, x in weights.items():
        if name.startswith(prefix) and ".lora_A." in name:
            return (x.shape if isinstance(x, Tensor) else x.size)[0]
    return None


def model_names(path: Path) -> list[str]:
    """The submodules whose weights a checkpoint holds."""
    path = locate(path)
    check(path)
    return _models(dcp.FileSystemReader(str(path / "dcp")).read_metadata().state_dict_metadata)


def _models(stored: Iterable[str]) -> list[str]:
    prefix = "state_dict."
    return sorted({key[len(prefix) : key.index(".lm.")] for key in stored if key.startswith(prefix) and ".lm." in key})


def _listed(models: Iterable[str]) -> str:
    return " and ".join(f"a {name}" for name in models) or "no model"


def load_full_weights(path: Path, prefix: str) -> dict[str, Tensor]:
    """All weights under `prefix`, whole, in this process alone: for export, without a trainer."""
    path = locate(path)
    check(path)
    reader = dcp.FileSystemReader(str(path / "dcp"))
    stored = reader.read_metadata().state_dict_metadata
    key = f"state_dict.{prefix}"
    state = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in stored.items()
        if name.startswith(key) and isinstance(item, TensorStorageMetadata)
    }
    if not state:
        raise ValueError(f"checkpoint '{path}' holds no weights named '{prefix}*'")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as `no_dist` says
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {name.removeprefix(key): x for name, x in state.items()}


def rng_state() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, python_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [str(kind), torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, list(words), python_gauss],
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, python_gauss = state["python"]
    random.setstate((version, tuple(words), python_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
