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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

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


def model_state(model: nn.Module, *, exclude: Sequence[str]) -> dict[str, Any]:
    """Sharded weights by name, without the submodules named in `exclude` (fixed reference models)."""
    prefixes = tuple(f"{name}." for name in exclude)
    return {name: x for name, x in get_model_state_dict(model).items() if not name.startswith(prefixes)}


def optimizer_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return get_optimizer_state_dict(model, optimizer)


def save(
    checkpoint: dict[str, Any],
    path: Path,
    *,
    rank: int,
    barrier: Callable[[], None],
    files: Callable[[Path], None],
) -> None:
    """Writes beside `path` and renames after every process has succeeded; `files` adds the model's own files."""
    partial = path.with_name(path.name + ".incomplete")
    if rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    state = {"state_dict": checkpoint.pop("state_dict")}
    state |= {f"optimizer_{i}": x for i, x in enumerate(checkpoint.pop("optimizer_states", []))}
    torch.save(rng_state(), partial / f"rank_{rank:05d}.pt")
    if rank == 0:
        torch.save(checkpoint, partial / "meta.pt")
        files(partial / "model")
    dcp.save(state, checkpoint_id=str(partial / "dcp"))
    barrier()
    if rank == 0:
        _replace(partial, path)
    barrier()


def _replace(source: Path, target: Path) -> None:
    aside = target.with_name(target.name + ".old")
    shutil.rmtree(aside, ignore_errors=True)
    if target.exists():
        os.replace(target, aside)
    os.replace(source, target)
    shutil.rmtree(aside, ignore_errors=True)


def remove(path: Path) -> None:
    """Renames first, so that a half-deleted checkpoint never looks like a whole one."""
    if not path.exists():
        return
    aside = path.with_name(path.name + ".removed")
    shutil.rmtree(aside, ignore_errors=True)
    os.replace(path, aside)
    shutil.rmtree(aside, ignore_errors=True)


def locate(path: Path) -> Path:
    """`path`, or the checkpoint it was replacing when the process was killed between the two renames."""
    aside = path.with_name(path.name + ".old")
    return aside if aside.is_dir() and not path.exists() else path


def check(path: Path) -> None:
    """A clear sentence where `path` is not a checkpoint."""
    if not path.exists():
        raise ValueError(f"checkpoint '{path}' does not exist; set --ckpt_path to a *.ckpt directory of a run")
    if not (path / "meta.pt").is_file() or not (path / "dcp" / ".metadata").is_file():
        raise ValueError(
            f"'{path}' is not a complete checkpoint (no meta.pt or dcp/.metadata); name another in --ckpt_path"
        )


def load(
    path: Path, model: nn.Module, optimizers: Sequence[Optimizer], *, exclude: Sequence[str], rank: int, world: int
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Restores weights and optimizers in place, on any mesh; returns the rest, and this rank's random states if any."""
    path = locate(path)
    check(path)
    meta = torch.load(path / "meta.pt", map_location="cpu", weights_only=True)
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
