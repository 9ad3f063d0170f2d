"""The models of an algorithm: how they are made, what an engine gets of them, and what checkpoints say of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from rl2lightning.algorithms.guard import NonFiniteGuard
from rl2lightning.algorithms.optimizer import OptimizerConfig, Trained, follow_config
from rl2lightning.compat import ignore_misplaced_advice, log_under_global_step, settle_epoch
from rl2lightning.models.build import copy_generation_config, gathered_weights, load_config, resolve_model
from rl2lightning.models.lora import FrozenBase, LoRAConfig, merged_weights
from rl2lightning.models.lora_files import plain_config, read_base, scaling, write_config
from rl2lightning.models.policy import PackedModel, Policy
from rl2lightning.parallel.strategy import FSDP2TPStrategy


class ModelOwner(L.LightningModule):
    """The part of `PostTrainingModule` that has to do with its models: a policy, unless a subclass makes others."""

    model_path: str
    random_init: bool
    tokenizer_path: str
    init_seed: int
    lora: LoRAConfig | None
    optimizer_config: OptimizerConfig
    make_guard: Callable[[], NonFiniteGuard]
    policy: Policy | None
    trained: dict[str, Trained]  # by the name of the submodule; the first is the one whose steps are counted
    _directory: str | None = None
    _loaded_step: int = 0  # of the checkpoint that was read last

    @property
    def strategy(self) -> FSDP2TPStrategy:
        strategy = self.trainer.strategy
        if not isinstance(strategy, FSDP2TPStrategy):
            raise ValueError(
                f"trainer.strategy is {type(strategy).__name__}; rl2lightning modules need FSDP2TPStrategy "
                "('fsdp2_tp'), which also serves a single device"
            )
        return strategy

    def local_model_path(self) -> str:
        """The model's directory on this machine, looked up (and downloaded) once; the first call is collective."""
        if self._directory is None:
            find = partial(resolve_model, self.model_path, weights=not self.random_init)
            self._directory = str(self.strategy.on_one_rank_first(find))
        return self._directory

    def configure_model(self) -> None:
        ignore_misplaced_advice()
        if not self.trained:  # Lightning calls this again for every fit, validate, …
            self.build_models()
            model = self.primary.model
            num_parameters = sum(p.numel() for p in model.parameters())
            num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
            learn = f" ({num_trained / 1e6:,.2f} M learn)" if model.adapters is not None else ""
            axes = zip(self.device_mesh.mesh_dim_names, self.device_mesh.shape, strict=True)  # type: ignore[union-attr, arg-type]
            mesh = ", ".join(f"{name} {size}" for name, size in axes if size > 1) or "one process"
            rank_zero_info(
                f"{type(self).__name__} of {type(model.lm).__name__}: {num_parameters / 1e6:,.2f} M parameters{learn}, "
                f"{self.trainer.precision}, {self.device}, {mesh}"
            )

    def build_models(self) -> None:
        """Makes the models that learn and hands each to `train_model`, first the one whose steps are counted."""
        self.policy = self.build_policy(trainable=True)
        self.train_model("policy", self.policy, self.optimizer_config)

    def train_model(self, name: str, model: PackedModel, optimizer: OptimizerConfig) -> None:
        """Gives the submodule `name` an optimizer; `update(..., name)` steps it."""
        self.trained[name] = Trained(model, optimizer, self.make_guard())

    @property
    def primary(self) -> Trained:
        """The model whose optimizer steps are the Trainer's `global_step`."""
        return next(iter(self.trained.values()))

    def build_policy(self, *, trainable: bool) -> Policy:
        return self.strategy.build_policy(
            self.local_model_path(),
            random_init=self.random_init,
            seed=self.init_seed,
            trainable=trainable,
            lora=self.lora if trainable else None,
            name=self.model_path,
        )

    def build_reference(self) -> Policy:
        """The policy as it was in the model directory, frozen: with adapters, the model that they are on."""
        if self.lora is None:
            return self.build_policy(trainable=False)
        assert self.policy is not None
        return FrozenBase(self.policy)

    # ---- what an engine gets

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of the policy in the compute type, for an engine; every process must iterate."""
        assert self.policy is not None
        return merged_weights(self.policy, self.strategy.compute_dtype)

    # of one that takes adapters as they are

    @property
    def adapter_rank(self) -> int | None:
        return None if self.lora is None else self.lora.inner_size

    def frozen_weights(self) -> Iterator[tuple[str, Tensor]]:
        """As `policy_weights`, without the adapters."""
        assert self.policy is not None and self.policy.adapters is not None
        return gathered_weights(self.policy.adapters.frozen(), self.strategy.compute_dtype)

    def policy_adapter(self) -> tuple[dict[str, Any], Iterator[tuple[str, Tensor]]]:
        """peft's description of the policy's adapter, and its tensors, which every process must iterate."""
        assert self.policy is not None and self.policy.adapters is not None
        adapters = self.policy.adapters
        if adapters.copies:
            raise ValueError(
                f"an engine takes no modules trained whole ({', '.join(adapters.copies)}) beside an adapter: "
                "set engine.init_args.lora to merged"
            )
        return plain_config(adapters.config), gathered_weights(adapters.trained(), self.strategy.compute_dtype)

    # ---- files and checkpoints

    def write_model_files(self, directory: Path) -> None:
        """Config and tokenizer of the policy; checkpoints carry them, so that they can be exported alone."""
        from transformers import AutoTokenizer

        source = self.local_model_path()
        load_config(source).save_pretrained(directory)
        tokenizer = source if self.tokenizer_path == self.model_path else self.tokenizer_path
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
        copy_generation_config(source, directory)
        self.write_adapter_configs(directory)

    def write_adapter_configs(self, directory: Path) -> None:
        """What adapters of each model that learns are on and how they count; for `export`, too."""
        for name, trained in self.trained.items():
            if (adapters := trained.model.adapters) is not None:
                write_config(plain_config(adapters.config), directory / "adapters" / name, base=adapters.base)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["nonfinite_steps"] = {name: trained.guard.state_dict() for name, trained in self.trained.items()}
        checkpoint["adapter_scaling"] = self._adapter_scaling()
        checkpoint["algorithm"] = self._algorithm

    @property
    def weights_step(self) -> int:
        """Optimizer steps behind the weights: the Trainer's, except where a checkpoint is only evaluated."""
        evaluates = self.trainer.state.fn != TrainerFn.FITTING and self.trainer.ckpt_path is not None
        return self._loaded_step if evaluates else self.trainer.global_step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        theirs = checkpoint.get("algorithm", self._algorithm)
        if theirs != self._algorithm and self.trainer.state.fn == TrainerFn.FITTING:
            raise ValueError(
                f"checkpoint '{self.trainer.ckpt_path}' is of a run of {theirs}, which {self._algorithm} cannot go on "
                "with: `rl2lightning export` its model and set model.init_args.model to that, without --ckpt_path"
            )
        settle_epoch(checkpoint)
        self._loaded_step = checkpoint["global_step"]
        states = checkpoint.get("nonfinite_steps", {})  # not in those of version 0.1.0
        for name, trained in self.trained.items():  # fewer than were saved where nothing is to be learned
            if name in states:
                trained.guard.load_state_dict(states[name])
        stored = checkpoint.get("adapter_scaling", {})
        for name, factor in self._adapter_scaling().items():
            if stored.get(name, factor) != factor:
                raise ValueError(
                    f"adapters of '{name}' counted {stored[name]:g}-fold in the checkpoint, {factor:g}-fold here: "
                    "resume with the lora.rank, lora.alpha and lora.rslora it was made with"
                )
        self._check_bases()

    def _check_bases(self) -> None:
        """Adapters mean something on the weights alone that they were trained on."""
        assert (checkpoint := self.trainer.ckpt_path) is not None
        for name, trained in self.trained.items():
            if (adapters := trained.model.adapters) is None:
                continue
            theirs = read_base(Path(checkpoint, "model", "adapters", name))
            if theirs not in (None, adapters.base):
                raise ValueError(
                    f"checkpoint '{checkpoint}' holds adapters of the {name} for other weights than it has here: start "
                    "from the model that they were trained on (config.yaml of its run)"
                )

    @property
    def _algorithm(self) -> str:
        """The class of ours that this is one of."""
        return next(kind.__name__ for kind in type(self).__mro__ if kind.__module__.startswith("rl2lightning."))

    def on_train_start(self) -> None:
        # a checkpoint has the settings of its own run, which may have been others, or a shorter one
        used = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        for trained in self.trained.values():
            if trained.schedule is not None and trained.schedule in used:  # a user's own is left alone
                follow_config(trained.schedule, trained.optimizer)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        log_under_global_step(self.trainer)

    def _adapter_scaling(self) -> dict[str, float]:
        """What the adapters of each model that learns are multiplied by."""
        models = {name: trained.model.adapters for name, trained in self.trained.items()}
        return {name: scaling(plain_config(x.config)) for name, x in models.items() if x is not None}
