"""PPO: a critic tells how much better than expected each action was; several small steps on each rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from rl2lightning.algorithms.base import LossLevel
from rl2lightning.algorithms.kl_limit import KLLimit
from rl2lightning.algorithms.optimizer import OptimizerConfig
from rl2lightning.algorithms.policy_gradient import PolicyGradient
from rl2lightning.estimators import GAE, AdvantageEstimator, CriticEstimator, MonteCarlo, require
from rl2lightning.functional.losses import explained_variance, value_loss
from rl2lightning.models.build import load_config, resolve_model, unlike_token
from rl2lightning.models.heads import ScalarModel
from rl2lightning.policy_losses import KLPenalty
from rl2lightning.types import PromptBatch, Sequences

CriticTarget = Literal["monte_carlo", "bootstrapped"]


class PPO(PolicyGradient):
    """Proximal policy optimisation with a critic (Schulman et al., 2017, arXiv:1707.06347).

    Each rollout is scored once: values, old log-probs where something needs them, the reference's where the KL is on.
    Then it is gone through `epochs` times in `mini_batches` shares, in an order of its own each time. One Trainer batch
    is one step of the policy, which `global_step` counts, and one of the critic.

    `train/explained_variance` is that of the rollout's returns (the critic's targets) by its values, before the critic
    has learned from it.

    Args:
        critic_model: directory or hub name the critic starts from, for instance an exported reward model; its scalar
            head is new where there is none. None: that of the policy.
        critic_optimizer: AdamW and schedule of the critic.
        epochs: how often a rollout is gone through.
        mini_batches: optimizer steps of an epoch, each on its share of the samples; no more than there are samples.
        samples_per_prompt: completions of a prompt; the critic needs no group to compare with.
        advantage: turns rewards and values into advantages and the critic's targets.
        value_clip: how far from its old value a value may move before its gradient ends; None: as far as it likes.
        target_kl: when the approximate KL from the policy of the rollout exceeds this, the policy rests until the next
            rollout, while its steps count and the critic goes on. What a step finds is looked at before the next one,
            so that nothing waits for the device: the step that finds the KL too large is still taken. None: no limit.
        loss_level: averaging of both losses: over tokens, over sequences, or by a constant.
        kl: distance to the frozen reference: coefficient (0: no reference model is loaded), estimator, place. By
            default taken off the rewards.
        **kwargs: see `PolicyGradient` and `PostTrainingModule`.
    """

    def __init__(
        self,
        *args: Any,
        critic_model: str | None = None,
        critic_optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5),  # noqa: B008 - frozen, as are the next ones
        epochs: int = 1,
        mini_batches: int = 1,
        samples_per_prompt: int = 1,
        advantage: AdvantageEstimator = GAE(),  # noqa: B008
        value_clip: float | None = 0.2,
        target_kl: float | None = None,
        loss_level: LossLevel = "token",
        kl: KLPenalty = KLPenalty(estimator="k1", place="reward"),  # noqa: B008
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *args, samples_per_prompt=samples_per_prompt, advantage=advantage, loss_level=loss_level, kl=kl, **kwargs
        )
        if epochs < 1 or mini_batches < 1:
            raise ValueError(f"epochs={epochs} and mini_batches={mini_batches} must be at least 1")
        if not (isinstance(advantage, CriticEstimator) and advantage.needs_values):
            raise ValueError(f"{type(advantage).__name__} has no use for a critic: set advantage to GAE, or use GRPO")
        if value_clip is not None and value_clip <= 0:
            raise ValueError(f"value_clip={value_clip} must be positive, or null for no limit")
        self.critic_path, self.critic_optimizer = critic_model, critic_optimizer
        self.critic: ScalarModel | None = None
        self._critic_directory: str | None = None
        self.mini_batches, self.updates_per_rollout = mini_batches, epochs * mini_batches
        self.value_clip = value_clip
        self.kl_limit = KLLimit(target_kl)
        # set by CriticWarmup: the policy rests while the critic learns these targets; None: both learn
        self.critic_warmup: CriticTarget | None = None

    def training_step(self, batch: PromptBatch, batch_idx: int) -> None:
        self.prepare(batch)
        share = self.share(self.experience, batch.step_of_rollout)
        self.update_policy(None if self.policy_rests(batch) else share)
        self.update(share, self.critic_loss, "critic", level=self.loss_level, length=self.loss_length)
        self.num_tokens_in_step = 0 if share is None else share.num_tokens  # also where the policy rested
        self.finish(batch)

    # ---- a rollout, scored once

    def score_rollout(self, seqs: Sequences) -> Sequences:
        assert self.critic is not None
        return super().score_rollout(seqs).replace(values=self.score(self.critic, seqs))

    def estimate(self, seqs: Sequences) -> Sequences:
        """Advantages, and the targets of the critic."""
        seqs = super().estimate(seqs)
        if self.critic_warmup == "monte_carlo":
            assert isinstance(self.advantage, CriticEstimator)
            seqs = seqs.replace(returns=MonteCarlo(gamma=self.advantage.gamma)(seqs).returns)
        values, returns = require(seqs, "values", self.advantage), require(seqs, "returns", self.advantage)
        self.log("train/explained_variance", explained_variance(values, returns, seqs.action_mask), batch_size=1)
        return seqs

    def worth_a_pass(self, seqs: Sequences) -> Sequences:
        return seqs  # the critic learns from every sequence, and with one nearly all advantages differ from 0

    # ---- two losses

    def update_policy(self, share: Sequences | None) -> None:
        logged = self.update(share, self.loss, level=self.loss_level, length=self.loss_length)
        if self.kl_limit.target is not None and logged:
            if "approx_kl" not in logged:
                raise ValueError("target_kl needs a loss that returns the diagnostic 'approx_kl'; or set it to null")
            # of all processes: those of one replica could differ in the last bit, and must decide alike
            self.kl_limit.note(self.strategy.max_over_processes(logged["approx_kl"].clone()))

    def policy_rests(self, batch: PromptBatch) -> bool:
        """Whether this step leaves the policy as it is; the same on every process."""
        if batch.first_of_rollout:
            self.kl_limit.reset()
        rests = self.kl_limit.exceeded() or self.critic_warmup is not None
        self.log("train/policy_rests", float(rests), batch_size=1)
        return rests

    def critic_loss(self, seqs: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """Unreduced loss [n] of a micro-batch and what is logged of it."""
        assert self.critic is not None
        values = self.critic(seqs, at="actions")
        old_values, returns = require(seqs, "values", self), require(seqs, "returns", self)
        clip = None if self.critic_warmup == "monte_carlo" else self.value_clip  # plain regression then
        logged = {"value": values.detach()}
        if clip is not None:
            logged["clip_fraction"] = ((values.detach() - old_values).abs() > clip).float()
        return value_loss(values, returns, old_values, clip=clip), logged

    # ---- the critic and its files

    def configure_model(self) -> None:
        super().configure_model()
        if self.critic is None and self.trainer.state.fn == TrainerFn.FITTING:  # nothing else has a use for it
            self.critic = self.build_critic()
            self.train_model("critic", self.critic, self.critic_optimizer)

    def build_critic(self) -> ScalarModel:
        lora = None if self.lora is None else self.lora.afresh()
        if self.critic_path is None:
            return self.strategy.build_scalar_model(
                self.local_model_path(),
                random_init=self.random_init,
                seed=self.init_seed,
                lora=lora,
                name=self.model_path,
            )
        from transformers import AutoTokenizer

        directory = self.strategy.on_one_rank_first(self._find_critic)
        words = [load_config(path).get_text_config().vocab_size for path in (self.local_model_path(), directory)]
        if words[1] < words[0]:
            raise ValueError(
                f"the critic reads the policy's tokens, but knows {words[1]} words where the policy knows {words[0]}: "
                f"set model.init_args.critic_model={self.critic_path!r} to a model with the policy's tokenizer"
            )
        if (token := unlike_token(AutoTokenizer.from_pretrained(self.tokenizer_path), directory)) is not None:
            raise ValueError(
                f"the critic reads the policy's tokens, and its tokenizer has another number for {token!r}: set "
                f"model.init_args.critic_model={self.critic_path!r} to a model with the policy's tokenizer"
            )
        return self.strategy.build_scalar_model(
            directory, random_init=False, seed=self.init_seed, lora=lora, name=self.critic_path
        )

    def _find_critic(self) -> str:
        """The directory of `critic_model` on this machine, looked up once."""
        assert self.critic_path is not None
        if self._critic_directory is None:
            self._critic_directory = resolve_model(self.critic_path)
        return self._critic_directory

    def write_model_files(self, directory: Path) -> None:
        super().write_model_files(directory)
        if self.critic_path is not None:  # it may be of another architecture, which an export has to know
            load_config(self._find_critic()).save_pretrained(directory / "critic")

    # ---- checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["kl_limit"] = self.kl_limit.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.kl_limit.load_state_dict(checkpoint["kl_limit"])
