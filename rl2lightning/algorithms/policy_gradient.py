"""What the algorithms that learn from rollouts share: experience, its scores and its shares, the policy's loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol, runtime_checkable

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from rl2lightning.algorithms.base import LossLevel, PostTrainingModule, require_rollout
from rl2lightning.algorithms.metrics import values_and_logged
from rl2lightning.estimators import AdvantageEstimator, GroupRelative
from rl2lightning.policy_losses import (
    KLPenalty,
    MismatchCorrection,
    PolicyLoss,
    PPOClip,
    mismatch_max,
    mismatch_metrics,
)
from rl2lightning.seeding import run_seed
from rl2lightning.types import PromptBatch, SamplingParams, Sequences

_LOST = {
    "dropped": "dropped, as a reward or the environment failed",
    "prompts_too_long": "never begun, as their prompts leave no room in the engine's max_model_len",
}  # by the metric that counts them


@runtime_checkable
class CountsPrompts(Protocol):
    """A data module that knows how many prompts a rollout has."""

    prompts_per_rollout: int


class PolicyGradient(PostTrainingModule):
    """Learns from rollouts that score well: the base of GRPO and PPO.

    A rollout becomes experience once: scored, with advantages, in an order of its own (`prepare`). The optimizer steps
    that follow each take their share of it. A subclass says how many there are (`updates_per_rollout`), into how many
    shares they cut it (`mini_batches`), and whether anything else than the policy learns.

    Args:
        sampling: how rollouts are sampled; the loss scores at its temperature. Without `eval_sampling`, validation
            takes its limit, stops and form, too, and the likeliest tokens.
        samples_per_prompt: group size.
        advantage: turns rewards into advantages.
        policy_loss: turns log-probs and advantages into the loss of each token.
        loss_level: averaging of the loss: over tokens, over sequences, or by a constant (Dr. GRPO).
        loss_length: with loss_level "constant", tokens a trajectory may have over all turns; None:
            `sampling.max_tokens` (set it to max_turns times that for several turns).
        kl: distance to the frozen reference: coefficient (0: no reference model is loaded), estimator, place.
        entropy_coef: weight of the entropy bonus.
        log_entropy: measure the entropy although its coefficient is 0; costs one more reduction over the vocabulary.
        mismatch: importance weights for what differs between rollout engine and trainer; None: only measured.
        reference_every: copy the policy into the reference every so many optimizer steps; None: never.
        **kwargs: see `PostTrainingModule`.
    """

    mini_batches: int = 1  # shares of a rollout; each time all of them have been used, a new epoch begins
    shares_setting = "mini_batches"  # that says how many
    loss_in_progress_bar = False  # about 0 at every on-policy step; the reward is shown instead

    def __init__(
        self,
        *args: Any,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008 - frozen, as are the next ones
        samples_per_prompt: int = 8,
        advantage: AdvantageEstimator = GroupRelative(),  # noqa: B008
        policy_loss: PolicyLoss = PPOClip(),  # noqa: B008
        loss_level: LossLevel = "sequence",
        loss_length: int | None = None,
        kl: KLPenalty = KLPenalty(),  # noqa: B008
        entropy_coef: float = 0.0,
        log_entropy: bool = False,
        mismatch: MismatchCorrection | None = None,
        reference_every: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(sampling, SamplingParams):
            raise ValueError(f"sampling={sampling!r} must be SamplingParams, as in SamplingParams(max_tokens=256)")
        greedy = replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)  # turns end as in training
        kwargs["eval_sampling"] = kwargs.get("eval_sampling") or greedy
        super().__init__(*args, **kwargs)
        if samples_per_prompt < 1:
            raise ValueError(f"samples_per_prompt={samples_per_prompt} must be at least 1")
        if sampling.greedy:
            raise ValueError("sampling.temperature=0 explores nothing: set a positive temperature for training")
        if sampling.truncating and (mismatch is not None or advantage.corrects_mismatch):
            settings = ", ".join(f"sampling.{setting}" for setting in sampling.truncating)
            who = "mismatch correction" if mismatch is not None else type(advantage).__name__
            instead = "mismatch to null" if mismatch is not None else "another advantage"
            raise ValueError(
                f"{who} weighs by log-probs of the whole distribution, and {settings} cuts a part of it off: "
                f"leave sampling whole (top_p 1, top_k, min_p and min_tokens 0, structured null), or set {instead}"
            )
        if mismatch is not None and advantage.corrects_mismatch:
            raise ValueError(f"{type(advantage).__name__} corrects the rollout mismatch already: set mismatch to null")
        if reference_every is not None and not kl.coef:
            raise ValueError(f"reference_every={reference_every} needs a reference: set kl.coef above 0")
        if reference_every is not None and self.lora is not None:
            raise ValueError(
                f"reference_every={reference_every} does not go with lora, whose frozen model is the reference: "
                "set one of them to null"
            )
        self.sampling = sampling
        self.samples_per_prompt = samples_per_prompt
        self.advantage, self.policy_loss, self.kl, self.mismatch = advantage, policy_loss, kl, mismatch
        self.loss_level: LossLevel = loss_level
        self.loss_length = loss_length or sampling.max_tokens
        self.entropy_coef, self.log_entropy = entropy_coef, log_entropy
        self.reference_every = reference_every
        self.reference = None
        # a fixed reference is found again in the model directory, so checkpoints leave it out
        self._set_length = loss_length is not None
        self.checkpoint_exclude = () if reference_every else ("reference",)
        self.seed = run_seed()  # of the order in which several updates see a rollout
        self.experience: Sequences | None = None  # of the rollout in progress, the same on every process

    def on_fit_start(self) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, CountsPrompts):
            return
        num_samples = data.prompts_per_rollout * self.samples_per_prompt
        if self.mini_batches > num_samples:
            raise ValueError(
                f"{self.shares_setting}={self.mini_batches} cannot share out the {num_samples} samples of a rollout "
                f"({data.prompts_per_rollout} prompts, {self.samples_per_prompt} samples each): set "
                f"model.init_args.{self.shares_setting} to {num_samples} at most, or raise data.prompts_per_rollout"
            )

    def configure_model(self) -> None:
        super().configure_model()
        fitting = self.trainer.state.fn == TrainerFn.FITTING  # nothing else has a use for the reference
        if self.kl.enabled and self.reference is None and fitting:
            self.reference = self.build_reference()

    def prepare(self, batch: PromptBatch) -> None:
        """Makes experience of a new rollout, and puts it in another order where the next epoch begins."""
        if batch.first_of_rollout:
            require_rollout(batch)
            self.experience = self.learn_from(self.strategy.gather_sequences(batch.rollout))
        elif batch.step_of_rollout % self.mini_batches == 0:
            self.experience = self.shuffled(self.experience)

    def finish(self, batch: PromptBatch) -> None:
        """What is due after an optimizer step of the policy."""
        if batch.step_of_rollout == self.updates_per_rollout - 1:
            self.experience = None
        self._update_reference()

    def check_turns(self, max_turns: int) -> None:
        if max_turns > 1 and self.loss_level == "constant" and not self._set_length:
            raise ValueError(
                f"loss_level 'constant' divides by the tokens of all turns: with max_turns={max_turns} set "
                f"model.init_args.loss_length, for instance to {max_turns} * sampling.max_tokens"
            )

    def check_partial(self) -> None:
        if self.mismatch is None and not self.advantage.corrects_mismatch:
            raise ValueError(
                "partial rollouts hold tokens of earlier weights: set model.init_args.mismatch, or an advantage that "
                "corrects for them (VTrace, Retrace, ClippedIS)"
            )

    @property
    def structured(self) -> bool:
        return self.sampling.structured is not None or super().structured

    def report_lost_samples(self, metrics: Mapping[str, float]) -> None:
        """Says once what a rollout has lost, by its metrics, and warns where it has lost all.

        Raises:
            ValueError: all rollouts did ever since training began, and too many.
        """
        lost = {name: int(metrics.get(name, 0)) for name in _LOST}
        if "reward" in metrics:
            self.learned_something()
            for name, number in lost.items():
                self.say_once(f"rollout/{name}", number, f"of this rollout {_LOST[name]}")
        elif any(lost.values()):
            what = " and ".join(f"{number} were {_LOST[name]}" for name, number in lost.items() if number)
            hint = "the warnings before this, and at max_model_len of the engine"
            self.learned_nothing(f"of all samples of this rollout, {what}", look_at=hint)

    def learn_from(self, rollout: Sequences | None) -> Sequences | None:
        """Scores a rollout, computes advantages and shuffles: the experience the next updates share out."""
        if rollout is None:
            return None
        # refilled groups come in another order on every layout; their numbers do not
        rollout = rollout.select(rollout.group_ids.argsort(stable=True))
        seqs = self.estimate(self.score_rollout(rollout))
        if self.kl.place == "advantage" and self.kl.coef:
            assert seqs.advantages is not None
            seqs = seqs.replace(advantages=seqs.advantages - self.kl.coef * self._old_kl(seqs))
        return self.shuffled(seqs)

    def estimate(self, seqs: Sequences) -> Sequences:
        """Adds the advantages of a scored rollout."""
        return self.advantage(seqs)

    def shuffled(self, experience: Sequences | None) -> Sequences | None:
        """In the order of this epoch, which depends on the seed of the run and on the step, and on no layout."""
        if experience is None or self.mini_batches == 1:
            return experience
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.trainer.global_step)
        return experience.select(torch.randperm(len(experience), generator=generator))

    def score_rollout(self, seqs: Sequences) -> Sequences:
        """Adds the log-probs that are needed and no others, and the KL term to the rewards if that is its place."""
        assert self.policy is not None
        # of several updates, the later ones are compared with the policy from before the first
        if self.updates_per_rollout > 1 or self.kl.needs_old_logps or self.advantage.needs_old_logps:
            seqs = seqs.replace(old_logps=self.score(self.policy, seqs))
        if self.reference is not None:
            seqs = seqs.replace(ref_logps=self.score(self.reference, seqs))
        if self.kl.enabled and self.kl.place == "reward":
            assert seqs.rewards is not None
            seqs = seqs.replace(rewards=seqs.rewards - self.kl.coef * self._old_kl(seqs))
        return seqs

    def _old_kl(self, seqs: Sequences) -> Tensor:
        assert seqs.old_logps is not None and seqs.ref_logps is not None
        kl = self.kl(seqs.old_logps, seqs.ref_logps) * seqs.action_mask
        self.log("train/kl", kl.sum() / seqs.action_mask.sum(), batch_size=1)
        return kl

    def share(self, experience: Sequences | None, step: int) -> Sequences | None:
        """The part of the experience that optimizer step `step` of the rollout learns from."""
        if experience is None or self.mini_batches == 1:
            return experience
        part = torch.arange(len(experience)).tensor_split(self.mini_batches)[step % self.mini_batches]
        return experience.select(part) if len(part) else None

    def worth_a_pass(self, seqs: Sequences) -> Sequences:
        """Without KL and entropy terms, a sequence whose advantages are all 0 has loss 0: no forward is spent on it.

        A subclass with a loss of its own gets every sequence, since its loss may be another.
        """
        own_loss = type(self).loss is not PolicyGradient.loss
        if own_loss or (self.kl.coef and self.kl.place == "loss") or self.entropy_coef or self.log_entropy:
            return seqs
        assert seqs.advantages is not None
        # whatever is not exactly 0 stays, NaN included: that is for the guard to see
        return seqs.select((seqs.sum_per_sequence(seqs.advantages.abs()) != 0).nonzero().flatten())

    def loss(self, seqs: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """Unreduced loss [n] of a micro-batch and what is logged of it; override it to try another."""
        logps, entropy = self.logps(seqs, entropy=bool(self.entropy_coef) or self.log_entropy)
        loss, logged = values_and_logged(self.policy_loss(logps, seqs), type(self.policy_loss).__name__)
        old_logps = logps.detach() if seqs.old_logps is None else seqs.old_logps  # on-policy: one forward is enough
        if seqs.rollout_logps is not None:
            logged |= mismatch_metrics(old_logps, seqs) | {"mismatch_max": mismatch_max(old_logps, seqs)}
            if self.mismatch is not None:
                loss = loss * self.mismatch(old_logps, seqs)
        if self.kl.coef and self.kl.place == "loss":
            assert seqs.ref_logps is not None
            kl = self.kl(logps, seqs.ref_logps)
            loss, logged = loss + self.kl.coef * kl, logged | {"kl": kl}
        if entropy is not None:
            logged["entropy"] = entropy
            if self.entropy_coef:
                loss = loss - self.entropy_coef * entropy
        return loss, logged

    def _update_reference(self) -> None:
        if self.reference_every and self.trainer.global_step % self.reference_every == 0:
            assert self.reference is not None and self.policy is not None
            with torch.no_grad():
                for ours, theirs in zip(self.reference.parameters(), self.policy.parameters(), strict=True):
                    ours.copy_(theirs)  # both sharded alike: no communication

    # ---- a rollout in progress survives in the checkpoint

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_save_checkpoint(checkpoint)
        checkpoint["seed"] = self.seed
        if self.experience is not None:
            seqs = self.experience
            fields = {"input_ids": seqs.input_ids, "action_mask": seqs.action_mask, "cu_seqlens": seqs.cu_seqlens}
            fields |= seqs.token_fields() | seqs.sequence_fields() | {"temperature": seqs.temperature}
            checkpoint["experience"] = fields

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        self.seed = checkpoint["seed"]
        self.experience = Sequences(**checkpoint["experience"]) if "experience" in checkpoint else None
