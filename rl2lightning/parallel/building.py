"""How models come to be on the mesh: made without memory, cut, sharded, and filled with each process's own slices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import rank_zero_info
from torch.distributed.fsdp import MixedPrecisionPolicy

from rl2lightning.models.attention import keep_attention
from rl2lightning.models.build import (
    build_causal_lm,
    build_scalar_lm,
    decoder_blocks,
    init_head,
    init_weights,
    load_config,
    load_weights,
    materialize,
)
from rl2lightning.models.heads import SCALAR_HEAD, ScalarModel
from rl2lightning.models.lora import LoRAConfig, add_adapters
from rl2lightning.models.lora_files import fingerprint
from rl2lightning.models.policy import PackedModel, Policy
from rl2lightning.parallel import precision
from rl2lightning.parallel.fsdp import apply_fsdp
from rl2lightning.parallel.mesh import Meshes
from rl2lightning.parallel.tensor import apply_tensor_parallel
from rl2lightning.parallel.tensor_adapters import cut_adapters

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule
    from transformers import PretrainedConfig, PreTrainedModel

M = TypeVar("M", bound=PackedModel)


class ModelBuilding:
    """The strategy's models, by its settings."""

    meshes: Meshes  # from setup_environment on
    tensor_sequence: bool
    activation_checkpointing: Literal["none", "selective", "full"]
    compile: bool
    reshard_after_forward: bool | None
    cpu_offload: bool

    if TYPE_CHECKING:  # properties of Lightning's

        @property
        def root_device(self) -> torch.device: ...

        @property
        def lightning_module(self) -> LightningModule | None: ...

        @property
        def precision_plugin(self) -> Precision: ...

    def build_policy(
        self,
        directory: str,
        *,
        random_init: bool,
        seed: int = 0,
        trainable: bool = True,
        lora: LoRAConfig | None = None,
        name: str | None = None,
    ) -> Policy:
        """A sharded policy: fp32 masters if trainable, otherwise frozen in the compute type.

        Built on meta, sharded, then each process reads its own slices of the safetensors (or draws random weights).

        Args:
            directory: the model.
            random_init: draw weights instead of reading them.
            seed: of what is drawn.
            trainable: whether it learns.
            lora: adapters, which learn in the place of the weights.
            name: what files of the adapters call the model; None: the directory.
        """
        config, name = load_config(directory), name or directory
        policy = self._sharded(Policy, build_causal_lm, config, trainable=trainable, lora=lora, name=name)
        if random_init:
            init_weights(policy.lm, config, seed)
        else:
            load_weights(policy.lm, directory, parameters=policy.adapters and policy.adapters.frozen())
        return self._started(policy, lora, seed, directory)

    def build_scalar_model(
        self,
        directory: str,
        *,
        random_init: bool,
        seed: int = 0,
        trainable: bool = True,
        lora: LoRAConfig | None = None,
        name: str | None = None,
    ) -> ScalarModel:
        """A sharded reward model or critic, likewise; its head is new where the directory holds a causal LM.

        With adapters the head learns, too.
        """
        config, name = load_config(directory), name or directory
        model = self._sharded(ScalarModel, build_scalar_lm, config, trainable=trainable, lora=lora, name=name)
        lm = model.lm
        if random_init:
            init_weights(lm, config, seed)
        else:
            parameters = None
            if model.adapters is not None:
                parameters = {**model.adapters.frozen(), SCALAR_HEAD: lm.get_parameter(SCALAR_HEAD)}
            optional, superfluous = {SCALAR_HEAD}, {"lm_head.weight"}
            if load_weights(lm, directory, optional=optional, superfluous=superfluous, parameters=parameters):
                init_head(lm, seed)
                if not (trainable and self._reads_checkpoint):  # which has another one
                    rank_zero_info(f"'{directory}' has no scalar head: a new one is drawn with seed {seed}")
        return self._started(model, lora, seed, directory)

    @property
    def _reads_checkpoint(self) -> bool:
        """Whether what learns is read from a checkpoint once it is built."""
        return self.lightning_module is not None and self.lightning_module.trainer.ckpt_path is not None

    def _started(self, model: M, lora: LoRAConfig | None, seed: int, directory: str) -> M:
        """A model whose frozen weights are there, with first values of its adapters.

        In training mode, a frozen one too: `scoring` turns dropout off, and Lightning warns of what is in eval mode.
        """
        if model.adapters is not None and lora is not None:
            model.adapters.start(seed, lora.path)
            model.adapters.base = fingerprint(directory)
        model.train()
        return model

    def _sharded(
        self,
        kind: type[M],
        build: Callable[[PretrainedConfig, torch.dtype], PreTrainedModel],
        config: PretrainedConfig,
        *,
        trainable: bool,
        lora: LoRAConfig | None,
        name: str,
    ) -> M:
        """A model spread over the mesh, with memory of its own but nothing in it yet."""
        lm = build(config, precision.parameter_dtype(self.precision_plugin, trainable=trainable and lora is None))
        lm.requires_grad_(trainable)
        model = kind(lm)
        apply_tensor_parallel(lm, self.meshes.tensor, sequence_parallel=self.tensor_sequence)
        blocks = decoder_blocks(lm)
        if lora is not None:
            dtype = precision.parameter_dtype(self.precision_plugin, trainable=True)
            model.adapters = add_adapters(lm, lora, dtype, base=name)
            cut_adapters(model.adapters, self.meshes.tensor, sequence_parallel=self.tensor_sequence)
        if trainable and self.activation_checkpointing != "none":
            settings: dict[str, Any] = {"use_reentrant": False}
            if self.activation_checkpointing == "selective":
                settings["context_fn"] = keep_attention
            lm.gradient_checkpointing_enable(settings)
        if self.compile:
            for block in blocks:
                block.compile()
        shared = self.meshes.num_shards > 1
        fsdp = partial(
            apply_fsdp,
            mesh=self.meshes.parameters,
            reshard_after_forward=shared if self.reshard_after_forward is None else self.reshard_after_forward,
            in_host_memory=self.cpu_offload,
        )
        for module in model.full_precision:
            fsdp(module, [], mp_policy=MixedPrecisionPolicy())
        fsdp(model, blocks, mp_policy=precision.mixed_precision_policy(self.precision_plugin))
        materialize(lm, torch.device("cpu") if self.cpu_offload else self.root_device, buffers=self.root_device)
        return model
