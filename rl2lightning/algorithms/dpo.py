"""DPO and its relatives: the preference loss says which one it is."""

from __future__ import annotations

import gc
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from rl2lightning.algorithms.pairs import check_pairs, on_both_halves, pair_units, split_pairs
from rl2lightning.algorithms.preference import PreferenceModule
from rl2lightning.algorithms.reference import PrecomputedReference, ReadsAhead, model_key
from rl2lightning.functional.losses import sft_loss
from rl2lightning.functional.masked import actions_per_sequence
from rl2lightning.models.policy import Policy
from rl2lightning.preference_losses import PreferenceLoss, Sigmoid
from rl2lightning.types import ChatBatch, Sequences


class DPO(PreferenceModule):
    """Learns from pairs of a chosen and a rejected answer, without rewards or samples (Rafailov et al., 2023).

    The defaults are DPO; IPO, SimPO and ORPO are a config each (`configs/`), robust DPO, the hinge loss, RPO
    (`nll_coef: 1`) and length-normalised variants a setting of `preference_loss`. The reference is the model that
    training starts from; with `lora` it is the frozen one, without adapters, and so without those of `lora.path`, too.

    Args:
        preference_loss: turns the log-probs of the answers, and the reference's, into the loss of each pair.
        reference: precomputed: score all rows once before training, keep the numbers on disk, and no second model in
            memory. live: keep the frozen model and score each step; for a short try on much data. A loss without
            reference has neither, whatever this says.
        reference_cache: directory of the precomputed numbers, which runs may share; None: `reference_logps` in
            trainer.default_root_dir. It has to be None where nothing is precomputed.
        **kwargs: see `PostTrainingModule`.
    """

    def __init__(
        self,
        *args: Any,
        preference_loss: PreferenceLoss = Sigmoid(),  # noqa: B008 - frozen
        reference: Literal["precomputed", "live"] = "precomputed",
        reference_cache: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if reference == "live" and not preference_loss.needs_reference:  # the default says nothing of what is wanted
            rank_zero_info(f"{type(preference_loss).__name__} has no reference: reference 'live' is not used")
        self.preference_loss = preference_loss
        self.precomputes = preference_loss.needs_reference and reference == "precomputed"
        if reference_cache is not None and not self.precomputes:
            why = (
                "reference is live" if preference_loss.needs_reference else f"{type(preference_loss).__name__} has none"
            )
            raise ValueError(f"reference_cache={reference_cache!r} would keep nothing, since {why}: set it to null")
        self.reference_cache = reference_cache
        self.precomputed: PrecomputedReference | None = None

    @property
    def keeps_reference(self) -> bool:
        return self.preference_loss.needs_reference and not self.precomputes

    # ---- pairs

    def units(self, seqs: Sequences) -> list[list[int]] | None:
        return None if seqs.labels is None else pair_units(seqs)  # the reference scores single sequences, too

    def check(self, seqs: Sequences) -> None:
        check_pairs(seqs)

    def counted_tokens(self, seqs: Sequences) -> Tensor:
        """The chosen answers' tokens: what the negative log-likelihood is averaged over."""
        assert seqs.labels is not None
        return seqs.action_mask & seqs.labels[seqs.sequence_ids]

    def training_step(self, batch: ChatBatch, batch_idx: int) -> None:
        seqs = self.training_sequences(batch)
        self.update(None if seqs is None else self.with_reference(seqs), self.loss)

    def with_reference(self, seqs: Sequences) -> Sequences:
        if not self.preference_loss.needs_reference:
            return seqs
        return seqs.replace(ref_sums=self.reference_logps(seqs))

    def loss(self, seqs: Sequences) -> tuple[Tensor | tuple[Tensor, Tensor], dict[str, Tensor]]:
        """Unreduced loss of a micro-batch of pairs: [B], each half carrying its pair's, and [n] where there is NLL."""
        logps, _ = self.logps(seqs)
        sums = seqs.sum_per_sequence(logps)
        counts = actions_per_sequence(seqs.action_mask, seqs.sequence_ids, len(seqs)).clamp(min=1)
        scale = counts.reciprocal() if self.preference_loss.uses_means else torch.ones_like(sums)
        answers, refs = scale * sums, None if seqs.ref_sums is None else scale * seqs.ref_sums
        values = self.preference_loss(*split_pairs(answers), *((None, None) if refs is None else split_pairs(refs)))
        rewards = self.preference_loss.rewards(answers.detach(), refs)
        logged = {name: on_both_halves(x) for name, x in self._per_pair(rewards, sums.detach()).items()}
        values, weight = on_both_halves(values), self.preference_loss.nll_weight
        if not weight:
            return values, logged
        nll = sft_loss(logps)  # its weights are 0 off the chosen answers
        return (values, weight * nll), logged | {"preference_loss": values, "nll": nll}

    @staticmethod
    def _per_pair(rewards: Tensor, sums: Tensor) -> dict[str, Tensor]:
        """What is logged of each pair [P], from rewards and log-probs of its halves [2P]."""
        (chosen, rejected), (chosen_logps, rejected_logps) = split_pairs(rewards), split_pairs(sums)
        return {
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "margin": chosen - rejected,
            "pair_accuracy": (chosen > rejected).float(),
            "chosen_logps": chosen_logps,
            "rejected_logps": rejected_logps,
        }

    # ---- held out

    def measure(self, seqs: Sequences) -> dict[str, Tensor]:
        return self.evaluate(self.with_reference(seqs), self.loss)

    def weight_of(self, name: str, seqs: Sequences) -> int:
        return int(self.counted_tokens(seqs).sum()) if name == "nll" else len(seqs)

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        if "nll" in means:  # pairs and tokens are not in the same proportion in every batch
            means["loss"] = means["preference_loss"] + self.preference_loss.nll_weight * means["nll"]
        return means

    # ---- the reference, scored once

    def on_fit_start(self) -> None:
        self._precompute(training=True)

    def on_validation_start(self) -> None:
        if self.trainer.state.fn == TrainerFn.VALIDATING:  # a fit has done so already
            self._precompute(training=False)

    def on_test_start(self) -> None:
        self._precompute(training=False)

    def reference_logps(self, seqs: Sequences) -> Tensor:
        return super().reference_logps(seqs) if self.precomputed is None else self.precomputed(seqs)

    def _precompute(self, *, training: bool) -> None:
        """Has the reference score whatever rows it has not scored in an earlier run."""
        if not self.precomputes:
            return
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if not isinstance(data, ReadsAhead):
            raise ValueError(
                f"{type(data).__name__} cannot be read ahead to score its rows by the reference: use "
                "PreferenceDataModule, or set model.init_args.reference to live"
            )
        root = Path(self.reference_cache or Path(self.trainer.default_root_dir) / "reference_logps").expanduser()
        seed = self.init_seed if self.random_init else None
        name = partial(model_key, self.local_model_path(), self.strategy.compute_dtype, seed)
        self.precomputed = PrecomputedReference(self.strategy, root, name)
        reference = cache(self._temporary_reference)  # made when there is something to score, and gone afterwards
        self.precomputed.prepare(
            data.read_ahead(training=training),
            lambda seqs: seqs.sum_per_sequence(self.score(reference(), seqs)),
            show_progress=self.trainer.progress_bar_callback is not None,
        )
        reference.cache_clear()
        gc.collect()  # sharded modules hold on to themselves

    def _temporary_reference(self) -> Policy:
        assert self.policy is not None
        reference = self.build_reference()
        reference.pack = self.policy.pack  # how the plugin spreads sequences, which knows only models of the module
        return reference
