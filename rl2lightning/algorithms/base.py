"""`PostTrainingModule`: what the algorithms share, above all `update`, one optimizer step over packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from rl2lightning.algorithms.guard import NonFiniteGuard
from rl2lightning.algorithms.metrics import StepMetrics
from rl2lightning.compat import ignore_misplaced_advice
from rl2lightning.functional.masked import loss_weights
from rl2lightning.functional.packing import plan_micro_batches
from rl2lightning.models.attention import move
from rl2lightning.models.build import copy_generation_config, full_weights, load_config, resolve_model
from rl2lightning.models.policy import Policy
from rl2lightning.parallel.strategy import FSDP2TPStrategy
from rl2lightning.seeding import run_seed
from rl2lightning.types import PromptBatch, SamplingParams, Sequences, Trajectory

LossLevel = Literal["token", "sequence", "constant"]
LossFn = Callable[[Sequences], tuple[Tensor, dict[str, Tensor]]]  # micro-batch -> loss [n], diagnostics


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule.

    Args:
        lr: peak learning rate.
        betas: decay of the running averages of the gradient and its square.
        eps: term added to the denominator.
        weight_decay: decoupled weight decay, on matrices only (not on norms and biases).
        schedule: shape after the warm-up.
        warmup_ratio: share of all optimizer steps spent warming up linearly.
        min_lr_ratio: where linear and cosine end, as a share of `lr`.
    """

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    schedule: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_ratio: float = 0.03
    min_lr_ratio: float = 0.0

    def lr_at(self, step: int, num_steps: int) -> float:
        """Share of `lr` at a step counted from 0; the warm-up reaches 1 on its last step."""
        warmup = math.ceil(self.warmup_ratio * num_steps)
        if step < warmup:
            return (step + 1) / warmup
        if self.schedule == "constant":
            return 1.0
        progress = min(1.0, (step - warmup) / max(1, num_steps - warmup))
        shape = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.min_lr_ratio + (1 - self.min_lr_ratio) * shape


class PostTrainingModule(L.LightningModule):
    """Base of the algorithms: a policy, its optimizer, and one optimizer step per Trainer batch.

    A subclass writes `training_step` and a loss that returns unreduced values, one per token; `update` does the rest.

    Args:
        model: directory or hub name of a Hugging Face causal LM.
        random_init: start from random weights of that architecture.
        optimizer: AdamW and schedule.
        max_tokens_per_device: most tokens of one training micro-batch on one device.
        max_inference_tokens_per_device: the same for passes without gradients; None: twice the training budget.
        max_grad_norm: gradients are scaled down to this global norm; None: never.
        max_nonfinite_steps: so many steps in a row with a non-finite loss or gradient (each is skipped) end the run.
        tokenizer: directory or hub name of the tokenizer that data, rollouts, checkpoints and exports use; None: the
            model's own.
        init_seed: seed of random weights; None: that of the run (`seed_everything`).
        eval_sampling: how validation, test and prediction sample; None: greedily.
    """

    checkpoint_exclude: tuple[str, ...] = ()  # submodules that checkpoints leave out
    updates_per_rollout: int = 1  # optimizer steps a rollout is used for; the data module counts with it

    def __init__(
        self,
        model: str,
        random_init: bool = False,
        optimizer: OptimizerConfig = OptimizerConfig(),
        max_tokens_per_device: int = 16384,
        max_inference_tokens_per_device: int | None = None,
        max_grad_norm: float | None = 1.0,
        max_nonfinite_steps: int = 5,
        tokenizer: str | None = None,
        init_seed: int | None = None,
        eval_sampling: SamplingParams | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.model_path = model
        self.random_init = random_init
        self.optimizer_config = optimizer
        self.max_tokens_per_device = max_tokens_per_device
        self.max_inference_tokens_per_device = max_inference_tokens_per_device or 2 * max_tokens_per_device
        self.max_grad_norm = max_grad_norm
        self.tokenizer_path = tokenizer or model
        self.init_seed = run_seed() if init_seed is None else init_seed
        self._directory: str | None = None
        self.eval_sampling = eval_sampling or SamplingParams(temperature=0.0)
        self.num_tokens_in_step = 0  # of the last optimizer step, over all processes
        self.policy: Policy | None = None
        self.guard = NonFiniteGuard(max_nonfinite_steps)

    # ---- models and files

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

    def check_turns(self, max_turns: int) -> None:
        """Raises where the module cannot learn from trajectories of so many turns."""

    def configure_model(self) -> None:
        ignore_misplaced_advice()
        if self.policy is None:  # Lightning calls this again for every fit, validate, …
            self.policy = self.build_policy(trainable=True)
            num_parameters = sum(p.numel() for p in self.policy.parameters())
            axes = zip(self.device_mesh.mesh_dim_names, self.device_mesh.shape, strict=True)  # type: ignore[union-attr, arg-type]
            mesh = ", ".join(f"{name} {size}" for name, size in axes if size > 1) or "one process"
            rank_zero_info(
                f"{type(self).__name__} of {type(self.policy.lm).__name__}: {num_parameters / 1e6:,.2f} M parameters, "
                f"{self.trainer.precision}, {self.device}, {mesh}"
            )

    def build_policy(self, *, trainable: bool) -> Policy:
        return self.strategy.build_policy(
            self.local_model_path(), random_init=self.random_init, seed=self.init_seed, trainable=trainable
        )

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(HF name, full tensor) of the policy in the compute type, for an engine; every process must iterate."""
        assert self.policy is not None
        return full_weights(self.policy.lm, self.strategy.compute_dtype)

    def write_model_files(self, directory: Path) -> None:
        """Config and tokenizer of the policy; checkpoints carry them, so that they can be exported alone."""
        from transformers import AutoTokenizer

        source = self.local_model_path()
        load_config(source).save_pretrained(directory)
        tokenizer = source if self.tokenizer_path == self.model_path else self.tokenizer_path
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
        copy_generation_config(source, directory)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["nonfinite_steps"] = self.guard.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if "nonfinite_steps" in checkpoint:  # not in those of version 0.1.0
            self.guard.load_state_dict(checkpoint["nonfinite_steps"])

    # ---- optimizers

    def configure_optimizers(self) -> Any:
        assert self.policy is not None
        config = self.optimizer_config
        parameters = [p for p in self.policy.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        # fused: one kernel, and it can skip a step on the device
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)
        num_steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(num_steps):
            raise ValueError("the schedule needs an end: set trainer.max_steps or trainer.max_epochs")
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: config.lr_at(step, int(num_steps)))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "train/learning_rate"}]

    # ---- forward

    def logps(
        self, seqs: Sequences, *, model: Policy | None = None, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probs [n] (and entropies) of the actions of a micro-batch, 0 off actions, at the sampling temperature."""
        model = self.policy if model is None else model
        assert model is not None
        seqs = model.pack(seqs, self.device, self.strategy.compute_dtype)
        return model(seqs, temperature=seqs.temperature, entropy=entropy)

    def micro_batches(self, seqs: Sequences, *, training: bool) -> list[list[int]]:
        """This process's micro-batches as indices into the global `seqs`: balanced, equally many on every process."""
        max_tokens = self.max_tokens_per_device if training else self.max_inference_tokens_per_device
        plan = plan_micro_batches(
            seqs.lengths.tolist(),
            max_tokens=max_tokens * self.strategy.context,  # those processes share a micro-batch
            multiple_of=self.strategy.data_size,
            setting=("max_tokens_per_device" if training else "max_inference_tokens_per_device"),
        )
        share = len(plan) // self.strategy.data_size
        return plan[self.strategy.data_rank * share : (self.strategy.data_rank + 1) * share]

    def ready(self, seqs: Sequences, plan: Iterable[list[int]]) -> Iterator[Sequences]:
        """The planned micro-batches on the device; an empty one is a dummy: all ranks run the same collectives."""
        assert self.policy is not None
        for indices in plan:
            part = seqs.select(indices) if indices else Sequences.dummy(seqs)
            yield self.policy.pack(part, self.device, self.strategy.compute_dtype)

    # ---- validation, test and prediction sample completions, which the RolloutCallback does before these are called

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Trajectory]:
        require_rollout(batch)
        return batch.trajectories

    # ---- one optimizer step

    def update(
        self, seqs: Sequences | None, loss_fn: LossFn, *, level: LossLevel = "token", length: int | None = None
    ) -> None:
        """One optimizer step of the policy on `seqs`, the whole step's sequences, the same on every process.

        The loss is sum(weights * x) over all tokens of the step, where the weights depend on `level` alone; so neither
        micro-batches nor processes nor packing can change it.

        Args:
            seqs: what to learn from; None or without actions: a step that changes nothing but is counted.
            loss_fn: micro-batch -> unreduced loss [n] and diagnostics: [n] are averaged with the same weights, of
                scalars the maximum is logged.
            level: token: mean over tokens. sequence: mean over sequences of their means. constant: sum over
                (sequences * `length`).
        """
        if seqs is not None:
            seqs = self.worth_a_pass(self._weighted(seqs.to("cpu"), level, length))  # planned in host memory
        self.num_tokens_in_step = 0 if seqs is None else seqs.num_tokens
        self.log("train/learning_rate", self.optimizers().param_groups[0]["lr"], batch_size=1)  # type: ignore[union-attr]
        if seqs is None or not bool(seqs.action_mask.any()):
            self._step()  # gradients are None: nothing moves, but the step counts
            return
        assert self.policy is not None
        plan = self.micro_batches(seqs, training=True)
        metrics = StepMetrics()
        for i, micro in enumerate(self.ready(seqs, plan)):
            with self.strategy.gradient_sync(self.policy, i == len(plan) - 1):
                values, diagnostics = loss_fn(micro)
                assert micro.weights is not None
                loss = (values * micro.weights).sum()
                self.manual_backward(loss * self.strategy.gradient_scale)
            metrics.add(loss, micro.weights, diagnostics)
        logged = metrics.reduce(self.strategy)
        norm = self.strategy.clip_grad_norm(self.policy, self.max_grad_norm)
        self._step(finite=torch.isfinite(norm) & torch.isfinite(logged["loss"]))
        logged |= {"grad_norm": norm, "skipped_steps": self.guard.skipped}
        self.log_dict({f"train/{name}": x for name, x in logged.items() if name != "loss"}, batch_size=1)
        self.log("train/loss", logged["loss"], prog_bar=self.loss_in_progress_bar, batch_size=1)

    def _weighted(self, seqs: Sequences, level: LossLevel, length: int | None = None) -> Sequences:
        weights = loss_weights(seqs.action_mask, seqs.sequence_ids, len(seqs), level=level, constant_length=length)
        return seqs.replace(weights=weights)

    def worth_a_pass(self, seqs: Sequences) -> Sequences:
        """The sequences of a step that can move the policy; their weights are those within the whole step."""
        return seqs

    loss_in_progress_bar = True

    def _step(self, finite: Tensor | None = None) -> None:
        """Steps optimizer and schedule; a step with non-finite gradients is skipped on the device, without a wait."""
        optimizer, scheduler = self.optimizers(), self.lr_schedulers()
        assert not isinstance(optimizer, list) and scheduler is not None and not isinstance(scheduler, list)
        self.guard.before_step(optimizer.optimizer, finite)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()  # type: ignore[call-arg]
        self.guard.after_step()

    def evaluate(self, seqs: Sequences, loss_fn: LossFn, *, level: LossLevel = "token") -> dict[str, Tensor]:
        """Loss and diagnostics of `seqs` without gradients, reduced exactly as `update` does."""
        assert self.policy is not None
        seqs = self._weighted(seqs.to("cpu"), level)
        metrics = StepMetrics()
        with self.strategy.scoring(self.policy):
            for micro in self.ready(seqs, self.micro_batches(seqs, training=False)):
                values, diagnostics = loss_fn(micro)
                assert micro.weights is not None
                metrics.add((values * micro.weights).sum(), micro.weights, diagnostics)
        return metrics.reduce(self.strategy)

    def score(self, model: nn.Module, seqs: Sequences) -> Tensor:
        """Log-probs [N] of the actions of all `seqs` under `model`, on the CPU of every process, without gradients."""
        assert isinstance(model, Policy)
        out = torch.zeros(seqs.num_tokens, device=self.device)
        plan = self.micro_batches(seqs, training=False)
        starts = seqs.cu_seqlens[:-1].long()
        with self.strategy.scoring(model):
            for indices, micro in zip(plan, self.ready(seqs, plan), strict=True):
                logps, _ = self.logps(micro, model=model)
                if not indices:
                    continue
                lengths = seqs.lengths[indices]
                offsets = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
                tokens = starts[indices].repeat_interleave(lengths) + offsets
                out[move(tokens, self.device)] = logps
        return self.strategy.sum_over_data(out).cpu()  # every token was scored by one data rank


def require_rollout(batch: PromptBatch) -> None:
    """An error where prompts arrive as they are: nobody has played them, so nothing would happen."""
    if batch.rows and not batch.rolled_out and batch.rollout is None:
        raise ValueError("prompts came without completions: add rl2lightning.RolloutCallback to trainer.callbacks")
