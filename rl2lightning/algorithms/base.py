"""`PostTrainingModule`: what the algorithms share, above all `update`, one optimizer step over packed micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from rl2lightning.algorithms.guard import NonFiniteGuard
from rl2lightning.algorithms.metrics import StepMetrics, share_of_loss, values_and_logged
from rl2lightning.algorithms.models import ModelOwner
from rl2lightning.algorithms.optimizer import OptimizerConfig, Trained, adamw
from rl2lightning.compat import log_no_more
from rl2lightning.functional.masked import loss_weights
from rl2lightning.functional.packing import plan_micro_batches
from rl2lightning.models.attention import move
from rl2lightning.models.lora import LoRAConfig
from rl2lightning.models.policy import PackedModel, Policy
from rl2lightning.seeding import run_seed
from rl2lightning.types import PromptBatch, SamplingParams, Sequences, Trajectory, counted

LossLevel = Literal["token", "sequence", "constant"]
# micro-batch -> unreduced loss, diagnostics; of a loss with two normalisations, both parts, which are added up
LossFn = Callable[[Sequences], tuple[Tensor | tuple[Tensor, Tensor], dict[str, Tensor]]]

_IN_VAIN = 10  # steps without a sample, from the first on: then it is the data, not a row


class PostTrainingModule(ModelOwner):
    """Base of the algorithms: a policy, its optimizer, and one optimizer step per Trainer batch.

    A subclass writes `training_step` and a loss that returns unreduced values, one per token or one per sequence;
    `update` does the rest. One that trains another model than the policy, or several, says so in `build_models`.

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
        lora: train low-rank adapters on the frozen model instead of its weights; None: all weights.
    """

    checkpoint_exclude: tuple[str, ...] = ()  # submodules that checkpoints leave out
    updates_per_rollout: int = 1  # optimizer steps a rollout is used for; the data module counts with it
    predicts_completions: bool = True  # False: `predict_step` gets the held-out rows whole, not their prompts

    def __init__(
        self,
        model: str,
        random_init: bool = False,
        optimizer: OptimizerConfig = OptimizerConfig(),  # noqa: B008 - frozen
        max_tokens_per_device: int = 16384,
        max_inference_tokens_per_device: int | None = None,
        max_grad_norm: float | None = 1.0,
        max_nonfinite_steps: int = 5,
        tokenizer: str | None = None,
        init_seed: int | None = None,
        eval_sampling: SamplingParams | None = None,
        lora: LoRAConfig | None = None,
    ) -> None:
        super().__init__()
        if lora is not None and random_init:
            raise ValueError("lora adapts a model that knows something: set random_init to false, or lora to null")
        self.automatic_optimization = False
        self.model_path = model
        self.random_init = random_init
        self.lora = lora
        self.optimizer_config = optimizer
        self.max_tokens_per_device = max_tokens_per_device
        self.max_inference_tokens_per_device = max_inference_tokens_per_device or 2 * max_tokens_per_device
        self.max_grad_norm = max_grad_norm
        self.tokenizer_path = tokenizer or model
        self.init_seed = run_seed() if init_seed is None else init_seed
        self.eval_sampling = eval_sampling or SamplingParams(temperature=0.0)
        self.num_tokens_in_step = 0  # of the last optimizer step, over all processes
        self.make_guard = partial(NonFiniteGuard, max_nonfinite_steps)
        self.make_guard()  # which says so where the number makes no sense
        self.policy: Policy | None = None
        self.trained: dict[str, Trained] = {}

    # ---- what rollouts ask for

    def check_turns(self, max_turns: int) -> None:
        """Raises where the module cannot learn from trajectories of so many turns."""

    def check_partial(self) -> None:
        """Raises where the module cannot learn from trajectories that several versions of its weights have sampled."""

    @property
    def structured(self) -> bool:
        """Whether something is sampled in a structured form."""
        return self.eval_sampling.structured is not None

    # ---- optimizers

    def configure_optimizers(self) -> Any:
        num_steps = self.trainer.estimated_stepping_batches
        if not math.isfinite(num_steps):
            raise ValueError("the schedule needs an end: set trainer.max_steps or trainer.max_epochs")
        optimizers, schedules = [], []
        for name, trained in self.trained.items():
            trained.schedule = adamw(trained, int(num_steps))
            optimizers.append(trained.schedule.optimizer)
            name = self._logged("learning_rate", name)
            schedules.append({"scheduler": trained.schedule, "interval": "step", "name": name})
        return optimizers, schedules

    def _logged(self, metric: str, name: str) -> str:
        """What a metric of a model's update is logged as: only those of the models beside the first bear its name."""
        return f"train/{metric}" if self.trained[name] is self.primary else f"train/{name}_{metric}"

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
            units=self.units(seqs),
            setting=("max_tokens_per_device" if training else "max_inference_tokens_per_device"),
        )
        share = len(plan) // self.strategy.data_size
        return plan[self.strategy.data_rank * share : (self.strategy.data_rank + 1) * share]

    def units(self, seqs: Sequences) -> list[list[int]] | None:
        """Which sequences share a micro-batch because their loss needs them all; None: each stands for itself."""
        return None

    def ready(self, model: PackedModel, seqs: Sequences, plan: Iterable[list[int]]) -> Iterator[Sequences]:
        """The planned micro-batches on the device; an empty one is a dummy: all ranks run the same collectives."""
        units = self.units(seqs)
        dummy = Sequences.dummy(seqs, num_sequences=len(units[0]) if units else 1)
        for indices in plan:
            part = seqs.select(indices) if indices else dummy
            yield model.pack(part, self.device, self.strategy.compute_dtype)

    # ---- validation, test and prediction sample completions, which the RolloutCallback does before these are called

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def test_step(self, batch: Any, batch_idx: int) -> None: ...

    def predict_step(self, batch: PromptBatch, batch_idx: int) -> list[Trajectory]:
        require_rollout(batch)
        return batch.trajectories

    # ---- one optimizer step

    def update(
        self,
        seqs: Sequences | None,
        loss_fn: LossFn,
        name: str | None = None,
        *,
        level: LossLevel = "token",
        length: int | None = None,
    ) -> dict[str, Tensor]:
        """One optimizer step on `seqs`, the whole step's sequences, the same on every process.

        The loss is sum(weights * x) over all tokens of the step, where the weights depend on `level` alone; so neither
        micro-batches nor processes nor packing can change it.

        Args:
            seqs: what to learn from; None or without actions: a step that changes nothing but is counted.
            loss_fn: micro-batch -> unreduced loss and diagnostics. Loss: [n], one value per token, or [B], one per
                sequence (pairs, too), or one of each, to be added. Diagnostics [n] and [B] are averaged with the same
                weights, of scalars the maximum is logged.
            name: the submodule that learns; None: the first of `trained`.
            level: token: mean over tokens. sequence: mean over sequences of their means. constant: sum over
                (sequences * `length`). Values per sequence are averaged over sequences whatever it is.

        Returns:
            the reduced loss and diagnostics, on the device; empty for a step that changed nothing.
        """
        name = next(iter(self.trained)) if name is None else name
        index, trained = list(self.trained).index(name), self.trained[name]
        if seqs is not None:
            seqs = self.worth_a_pass(self._weighted(seqs.to("cpu"), level, length))  # planned in host memory
        optimizer, scheduler = self._optimizer(index)
        self.log(self._logged("learning_rate", name), optimizer.param_groups[0]["lr"], batch_size=1)
        if index == 0:
            self.num_tokens_in_step = 0 if seqs is None else seqs.num_tokens
        if seqs is None or not bool(seqs.action_mask.any()):
            self._step(trained, optimizer, scheduler)  # gradients are None: nothing moves, but the step counts
            log_no_more(self.trainer, trained.logged)
            return {}
        plan = self.micro_batches(seqs, training=True)
        metrics = StepMetrics()
        for i, micro in enumerate(self.ready(trained.model, seqs, plan)):
            with self.strategy.gradient_sync(trained.model, i == len(plan) - 1):
                loss, diagnostics = self._share(micro, loss_fn)
                self.manual_backward(loss * self.strategy.gradient_scale)
            metrics.add(loss, micro, diagnostics)
        logged = metrics.reduce(self.strategy)
        norm = self.strategy.clip_grad_norm(trained.model, self.max_grad_norm)
        self._step(trained, optimizer, scheduler, finite=torch.isfinite(norm) & torch.isfinite(logged["loss"]))
        values = logged | {"grad_norm": norm, "skipped_steps": trained.guard.skipped}
        trained.logged |= {self._logged(metric, name) for metric in values}
        self.log_dict({self._logged(k, name): x for k, x in values.items() if k != "loss"}, batch_size=1)
        shown = self.loss_in_progress_bar and index == 0
        self.log(self._logged("loss", name), logged["loss"], prog_bar=shown, batch_size=1)
        return logged

    @staticmethod
    def _share(micro: Sequences, loss_fn: LossFn) -> tuple[Tensor, dict[str, Tensor]]:
        """A micro-batch's part of the step's loss."""
        values, diagnostics = values_and_logged(loss_fn(micro), getattr(loss_fn, "__qualname__", repr(loss_fn)))
        parts = values if isinstance(values, tuple) else (values,)
        return torch.stack([share_of_loss(part, micro) for part in parts]).sum(), diagnostics

    def _weighted(self, seqs: Sequences, level: LossLevel, length: int | None = None) -> Sequences:
        tokens = self.counted_tokens(seqs)
        weights = loss_weights(tokens, seqs.sequence_ids, len(seqs), level=level, constant_length=length)
        return seqs.replace(weights=weights, sequence_weights=torch.full((len(seqs),), 1 / max(1, len(seqs))))

    def report_lost(self, seqs: Sequences | None, num_dropped: int, *, reason: str) -> None:
        """Logs how many samples of a step of data were dropped and cut off; see `learned_nothing` where none is left.

        Args:
            seqs: what is left of the whole step.
            num_dropped: samples of all processes that are not.
            reason: why they are not, to be read after "dropped, ".

        Raises:
            ValueError: nothing was left of any step so far, and of too many.
        """
        self.log("train/dropped_samples", float(num_dropped), batch_size=1)
        if seqs is not None:
            self.learned_something()
            num_truncated = 0 if seqs.truncated is None else int(seqs.truncated.sum())
            if seqs.truncated is not None:
                self.log("train/truncated_samples", float(num_truncated), batch_size=1)
            self.say_once("train/dropped_samples", num_dropped, f"dropped in this step, {reason}")
            self.say_once("train/truncated_samples", num_truncated, "cut off in this step, at data.max_length")
            return
        what = f"every sample of this step was dropped, {reason}"
        self.learned_nothing(what, look_at="the rows of data.path, and at data.max_length")

    def learned_something(self) -> None:
        self._steps_in_vain = None

    def learned_nothing(self, what: str, *, look_at: str) -> None:
        """Warns that samples of a step, or of a rollout, all came to nothing.

        Raises:
            ValueError: so they did ever since training began, and too often.
        """
        nothing_left = f"{what}: nothing was learned"
        rank_zero_warn(nothing_left)
        if self._steps_in_vain is not None:
            self._steps_in_vain += 1
            all_there_are = self.trainer.estimated_stepping_batches // self.updates_per_rollout
            if self._steps_in_vain >= min(_IN_VAIN, all_there_are):
                raise ValueError(
                    f"{nothing_left}; so it was in every step since training began ({self._steps_in_vain}): look at "
                    f"{look_at}"
                )

    def say_once(self, metric: str, number: int, happened: str) -> None:
        """The first time that samples were lost; later ones are in the metric alone."""
        if number and metric not in self._said:
            self._said = self._said | {metric}
            rank_zero_info(f"{counted(number, 'sample', 'samples')} {happened}; {metric} counts them from here on")

    def counted_tokens(self, seqs: Sequences) -> Tensor:
        """[N] bool: the tokens that a loss per token is averaged over."""
        return seqs.action_mask

    def worth_a_pass(self, seqs: Sequences) -> Sequences:
        """The sequences of a step that can move the model; their weights are those within the whole step."""
        return seqs

    loss_in_progress_bar = True
    _said: frozenset[str] = frozenset()  # what else was lost, of which the log has the numbers
    _steps_in_vain: int | None = 0  # that nothing was learned from; None once something was

    def _optimizer(self, index: int) -> tuple[LightningOptimizer, LambdaLR]:
        optimizers, schedulers = self.optimizers(), self.lr_schedulers()
        if not isinstance(optimizers, list):
            optimizers, schedulers = [optimizers], [schedulers]  # type: ignore[assignment, list-item]
        assert isinstance(schedulers, list)
        return optimizers[index], schedulers[index]  # type: ignore[return-value]

    def _step(
        self, trained: Trained, optimizer: LightningOptimizer, scheduler: LambdaLR, finite: Tensor | None = None
    ) -> None:
        """Steps optimizer and schedule; a step with non-finite gradients is skipped on the device, without a wait."""
        trained.guard.before_step(optimizer.optimizer, finite)
        # Lightning counts the steps it is asked for: those of the first model
        (optimizer if trained is self.primary else optimizer.optimizer).step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        trained.guard.after_step()

    def evaluate(
        self, seqs: Sequences, loss_fn: LossFn, name: str | None = None, *, level: LossLevel = "token"
    ) -> dict[str, Tensor]:
        """Loss and diagnostics of `seqs` without gradients, reduced exactly as `update` does."""
        model = (self.primary if name is None else self.trained[name]).model
        seqs = self._weighted(seqs.to("cpu"), level)
        metrics = StepMetrics()
        with self.strategy.scoring(model):
            for micro in self.ready(model, seqs, self.micro_batches(seqs, training=False)):
                loss, diagnostics = self._share(micro, loss_fn)
                metrics.add(loss, micro, diagnostics)
        return metrics.reduce(self.strategy)

    def score(self, model: PackedModel, seqs: Sequences) -> Tensor:
        """What `model` says of the actions of all `seqs`, [N] on the CPU of every process, without gradients.

        Log-probs of a policy, values of a critic.
        """

        def numbers(micro: Sequences) -> Tensor:
            if isinstance(model, Policy):
                return self.logps(micro, model=model)[0]
            return model(micro, at="actions")

        out = torch.zeros(seqs.num_tokens, device=self.device)
        plan = self.micro_batches(seqs, training=False)
        starts = seqs.cu_seqlens[:-1].long()
        with self.strategy.scoring(model):
            for indices, micro in zip(plan, self.ready(model, seqs, plan), strict=True):
                scored = numbers(micro)
                if not indices:
                    continue
                lengths = seqs.lengths[indices]
                offsets = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
                tokens = starts[indices].repeat_interleave(lengths) + offsets
                out[move(tokens, self.device)] = scored
        return self.strategy.sum_over_data(out).cpu()  # every token was scored by one data rank


def require_rollout(batch: PromptBatch) -> None:
    """An error where prompts arrive as they are: nobody has played them, so nothing would happen."""
    if batch.rows and not batch.rolled_out and batch.rollout is None:
        raise ValueError("prompts came without completions: add rl2lightning.RolloutCallback to trainer.callbacks")
