"""`FSDP2TPStrategy`: processes, one device mesh, precision, and the saving and loading of sharded models."""

from __future__ import annotations

import atexit
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from rl2lightning.compat import link_checkpoints_through
from rl2lightning.models.policy import PackedModel
from rl2lightning.parallel import checkpoint as ckpt
from rl2lightning.parallel import precision
from rl2lightning.parallel.building import ModelBuilding
from rl2lightning.parallel.checkpoint_writer import CheckpointWriter
from rl2lightning.parallel.collectives import Collectives
from rl2lightning.parallel.fsdp import clip_grad_norm, gradient_sync, reshard
from rl2lightning.parallel.mesh import build_meshes, mesh_shape
from rl2lightning.parallel.offload import ParkedMoments, in_host_memory
from rl2lightning.parallel.ring.plugin import RingAttention


class FSDP2TPStrategy(ModelBuilding, Collectives, ModelParallelStrategy):
    """FSDP2, tensor and sequence parallelism on one mesh, at any world size and on any device: one code path.

    Args:
        replicate: copies of the parameters (HSDP when more than 1).
        shard: processes that share one copy; "auto" takes all that the other axes leave.
        context: processes that share the tokens of each micro-batch (ring attention); they shard parameters, too.
            Settings of the attention go to the plugin `RingAttention` in trainer.plugins.
        tensor: processes that share each layer's matrices.
        tensor_sequence: under `tensor`, also spread what lies between the matrix products over the tokens of a row
            (Megatron's sequence parallelism): less memory, the same traffic.
        reshard_after_forward: frees gathered parameters between forward and backward; None: only where they are shared
            by several processes.
        reduce_each_micro_batch: reduces gradients after every micro-batch instead of once a step. Between micro-batches
            a process then holds its share of them, not all (4 bytes a parameter), for as many times the traffic.
        activation_checkpointing: "full" recomputes each transformer block in the backward pass, which trades a third
            more compute for memory that does not grow with depth; "selective" does, too, but keeps the output of
            attention, which at long sequences is most of that third.
        compile: compile each transformer block (torch.compile).
        offload: what leaves the GPU for page-locked host memory: the optimizer's moments at all times but its steps,
            each of which then moves them there and back, and the copying of checkpoints; with "all" also the parameters
            while an engine generates.
        cpu_offload: keep parameters, gradients and optimizer state in host memory, fetched block by block: slow, for
            finding out whether a model fits at all.
        async_checkpoints: write checkpoints while training goes on; a save waits for the one before it, so that of
            ModelCheckpoint's `save_last` only "link" keeps the training going.
        process_group_backend: None: gloo on the CPU, NCCL (with gloo for host data) on GPUs.
        timeout_seconds: how long a collective waits for a missing process before the run ends with an error.
    """

    def __init__(
        self,
        replicate: int = 1,
        shard: int | Literal["auto"] = "auto",
        context: int = 1,
        tensor: int = 1,
        tensor_sequence: bool = False,
        reshard_after_forward: bool | None = None,
        reduce_each_micro_batch: bool = False,
        activation_checkpointing: Literal["none", "selective", "full"] = "none",
        compile: bool = False,
        offload: Literal["none", "optimizer", "all"] = "none",
        cpu_offload: bool = False,
        async_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout_seconds: int = 1800,
    ) -> None:
        super().__init__(
            save_distributed_checkpoint=True,
            process_group_backend=process_group_backend,
            timeout=timedelta(seconds=timeout_seconds),
        )
        self.replicate = replicate
        self.shard: int | Literal["auto"] = shard
        self.context = context
        self.tensor = tensor
        self.tensor_sequence = tensor_sequence
        self.reshard_after_forward = reshard_after_forward
        self.reduce_each_micro_batch = reduce_each_micro_batch
        self.activation_checkpointing = activation_checkpointing
        self.compile = compile
        self.offload = offload
        self.cpu_offload = cpu_offload
        self.async_checkpoints = async_checkpoints
        self._checkpoints: CheckpointWriter | None = None  # from the first save of a fit on
        self._saves_at_once = False
        self._moments: list[ParkedMoments] = []
        self._pending_rng: dict[str, Any] | None = None

    # ---- processes and mesh

    def _get_process_group_backend(self) -> str:
        default = "cpu:gloo,cuda:nccl" if self.root_device.type == "cuda" else "gloo"
        return self._process_group_backend or default

    def _configure_launcher(self) -> None:
        # one process alone has no others to launch, and with a launcher Lightning refuses to run in a notebook
        if self.num_processes * self.num_nodes > 1:
            super()._configure_launcher()

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        # an orderly end of the groups, but not before the process's: there may be another fit
        atexit.unregister(_destroy_groups)
        atexit.register(_destroy_groups)
        shape = mesh_shape(
            self.world_size, replicate=self.replicate, shard=self.shard, context=self.context, tensor=self.tensor
        )
        self.meshes = build_meshes(self.root_device.type, shape)
        self._device_mesh = self.meshes.root
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def barrier(self, name: str | None = None) -> None:
        if not dist.is_initialized():
            return
        if self.root_device.type == "cuda":  # the default group has two backends; NCCL wants to know the device
            dist.barrier(device_ids=[self.root_device.index])
        else:
            dist.barrier()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.data_size, "rank": self.data_rank}

    # ---- precision

    @property
    def precision_plugin(self) -> Precision:
        return self._precision_plugin if self._precision_plugin is not None else Precision()

    @precision_plugin.setter  # type: ignore[override]
    def precision_plugin(self, plugin: Precision | None) -> None:  # type: ignore[override]
        self._precision_plugin = precision.translate(plugin)

    @property
    def compute_dtype(self) -> torch.dtype:
        return precision.compute_dtype(self.precision_plugin)

    # ---- models

    def model_to_device(self) -> None:
        """Moves what is left of the module; packed models are where they belong, which may be host memory."""
        assert self.model is not None
        modules = dict(self.model._modules)
        for name, child in modules.items():
            if isinstance(child, PackedModel):
                del self.model._modules[name]
        try:
            super().model_to_device()
        finally:
            self.model._modules = modules

    def on_one_rank_first(self, fn: Any) -> Any:
        """Global rank 0 runs fn before the others do, so that a download happens once; where it fails, so do theirs."""
        if self.global_rank == 0:
            try:
                return fn()
            finally:
                self.barrier()  # without it the others would wait for a process that has ended
        self.barrier()
        return fn()

    # ---- optimizers, and what `update` needs

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        self._moments = []
        if self.offload != "none" and not self.cpu_offload:  # with that they are in host memory anyway
            self._moments = [ParkedMoments(_unwrap(optimizer)) for optimizer in self.optimizers]

    def _park_moments(self) -> None:
        for kept in self._moments:
            kept.park()

    def gradient_sync(self, model: nn.Module, last: bool) -> Any:
        """A micro-batch's backward pass goes inside; `last`: it is the last one of the step."""
        return gradient_sync(model, last or self.reduce_each_micro_batch)

    def clip_grad_norm(self, model: nn.Module, max_norm: float | None) -> Tensor:
        return clip_grad_norm(model.parameters(), max_norm).to(self.root_device)

    @contextmanager
    def scoring(self, model: nn.Module) -> Iterator[None]:
        """Passes without gradients: no dropout, and nothing left gathered that a later step would find stale."""
        # of each module: those that a frozen base runs are its policy's, which may be in another mode
        modes = [(module, module.training) for module in (model, *model.modules())]
        model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            reshard(model)
            for module, training in modes:
                module.training = training

    @contextmanager
    def offloaded(self) -> Iterator[None]:
        """Makes room for an engine: what the setting `offload` names is in host memory inside."""
        if self.offload != "all" or self.cpu_offload:  # with that, storages are page-locked and cannot be resized
            yield
            return
        assert self.model is not None
        with in_host_memory(self.model.parameters()):
            yield

    # ---- checkpoints

    @property
    def _module(self) -> Any:  # a PostTrainingModule, which says what of it is saved
        return self.lightning_module

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.model is not None
        return ckpt.model_state(self.model, exclude=self._module.checkpoint_exclude)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        assert self.model is not None
        return ckpt.optimizer_state(self.model, _unwrap(optimizer))

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise ValueError(
                "save_checkpoint takes no storage_options: a checkpoint is a directory of distributed files"
            )
        path = Path(self.broadcast(str(filepath)))
        if self._checkpoints is None:
            self._checkpoints = CheckpointWriter(background=self.async_checkpoints, timeout=self._timeout)
        try:
            self._checkpoints.save(checkpoint, path, files=self._module.write_model_files)
        finally:
            self._park_moments()
        # where nothing goes on nobody else would wait for it
        if self._saves_at_once or self._module.trainer.state.status != TrainerStatus.RUNNING:
            self.wait_for_checkpoint()

    @contextmanager
    def saves_at_once(self) -> Iterator[None]:
        """Inside, a checkpoint is complete when `save_checkpoint` returns, whatever `async_checkpoints` says."""
        self._saves_at_once = True
        try:
            yield
        finally:
            self._saves_at_once = False

    def wait_for_checkpoint(self) -> None:
        """Returns when no checkpoint is being written; raises on every process if one could not be."""
        if self._checkpoints is not None:
            self._checkpoints.wait()

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        self.wait_for_checkpoint()
        path = Path(self.broadcast(str(checkpoint_path)))
        assert self.model is not None
        fitting = self._module.trainer.state.fn == TrainerFn.FITTING
        optimizers = [_unwrap(o) for o in self.optimizers] if fitting else []
        exclude = self._module.checkpoint_exclude
        meta, rng = ckpt.load(
            path, self.model, optimizers, exclude=exclude, rank=self.global_rank, world=self.world_size
        )
        self._park_moments()
        self._pending_rng = rng if fitting else None
        return meta

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        link_checkpoints_through(self.lightning_module.trainer, self._link_checkpoint)
        # the last hook before the first batch: nothing after it draws random numbers on the run's behalf
        if self._pending_rng is not None:
            ckpt.restore_rng(self._pending_rng)
            self._pending_rng = None

    def on_train_end(self) -> None:
        self.wait_for_checkpoint()

    def remove_checkpoint(self, filepath: Any) -> None:
        if self._checkpoints is not None:
            self._checkpoints.remove(Path(filepath))
        elif self.is_global_zero:
            ckpt.remove(Path(filepath))

    def _link_checkpoint(self, target: Path, name: Path) -> None:
        assert self._checkpoints is not None, "what is linked was saved"
        self._checkpoints.link(target, name)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        atexit.unregister(_destroy_groups)  # it would wait for a collective that the others may never join
        if isinstance(exception, RuntimeError) and self.world_size > 1 and "by peer" in str(exception):
            exception.add_note(_how_ended(getattr(self._launcher, "procs", [])))
        try:
            self.wait_for_checkpoint()
        except Exception as error:  # the exception that ended the run says more
            rank_zero_warn(f"while the run was ending: {error}")

    def setup(self, trainer: Any) -> None:
        self._attention().apply(self._module)
        super().setup(trainer)

    def _attention(self) -> RingAttention:
        """The plugin of trainer.plugins, or one with the default settings."""
        if self._layer_sync is None:
            self._layer_sync = RingAttention()
        if not isinstance(self._layer_sync, RingAttention):
            raise ValueError(
                f"{type(self).__name__} has no use for {type(self._layer_sync).__name__} in trainer.plugins (or "
                "trainer.sync_batchnorm): the layers it spreads are those of attention, by RingAttention"
            )
        # between the matrix products, tensor-parallel processes share the rows out
        self._layer_sync.row_multiple = self.tensor if self.tensor_sequence else 1
        return self._layer_sync

    def teardown(self) -> None:
        if isinstance(self._layer_sync, RingAttention):
            self._layer_sync.revert(self._module)
        checkpoints, self._checkpoints = self._checkpoints, None
        if checkpoints is not None:
            checkpoints.close()
        super().teardown()
        if dist.is_initialized() and self.root_device.type == "cuda":
            torch.cuda.synchronize()


def _destroy_groups() -> None:
    """Together: a process whose peer has left already may abort while its own groups are torn down."""
    if dist.is_initialized():
        with suppress(Exception):
            if dist.get_world_size() > 1:
                dist.barrier(device_ids=[torch.cuda.current_device()] if torch.cuda.is_initialized() else None)
        # A thread of gloo releases the tensors of a collective after that has returned, for which it needs the
        # interpreter's lock; where the interpreter has ended by then, the process aborts. Nothing tells of these
        # threads, and they end only with the last reference to their group; they need microseconds.
        time.sleep(0.1)
        with suppress(Exception):
            dist.destroy_process_group()


def _how_ended(launched: list[subprocess.Popen]) -> str:
    """What is known of a process that has left the others: all, where this one has launched it."""
    deadline = time.monotonic() + 1  # its connections end before it does
    while launched and time.monotonic() < deadline:
        for i, code in enumerate([process.poll() for process in launched], 1):
            if code:
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
                return f"process {i} of this node {how}"
        time.sleep(0.05)
    return "another process of the run has ended: its output, or its node's, says why"


def _unwrap(optimizer: Any) -> Any:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


if "fsdp2_tp" not in StrategyRegistry:  # `--trainer.strategy fsdp2_tp`
    StrategyRegistry.register("fsdp2_tp", FSDP2TPStrategy, description="FSDP2, tensor and sequence parallelism")
