"""KTO: answers labelled desirable or undesirable, each by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from rl2lightning.algorithms.preference import PreferenceModule
from rl2lightning.functional.losses import kto_reference_point
from rl2lightning.preference_losses import KTOLoss
from rl2lightning.types import ChatBatch, Sequences


class KTO(PreferenceModule):
    """Learns from answers that are labelled desirable or not (Ethayarajh et al., 2024, arXiv:2402.01306).

    The loss compares an answer's reward with a reference point z: how far the policy is from the reference on answers
    to other prompts, the mean over the whole optimizer step, at least 0 and without gradient. Each prompt of the step
    gets an answer to the next one; where there is no other, as in a step of one sample, z is 0.
    These combinations are new in every pass, so the reference stays in memory and nothing is precomputed.

    Pairs are learned from, too: PreferenceDataModule makes two labelled samples of each.

    Args:
        kto_loss: beta, and the weights of both kinds.
        **kwargs: see `PostTrainingModule`.
    """

    data_module = "UnpairedDataModule"

    def __init__(self, *args: Any, kto_loss: KTOLoss = KTOLoss(), **kwargs: Any) -> None:  # noqa: B008 - frozen
        super().__init__(*args, **kwargs)
        self.kto_loss = kto_loss

    @property
    def keeps_reference(self) -> bool:
        return True

    def check(self, seqs: Sequences) -> None:
        if seqs.labels is None:
            raise ValueError(
                "these sequences say nothing of which is desirable: use UnpairedDataModule, or, for pairs, "
                "PreferenceDataModule"
            )

    def training_step(self, batch: ChatBatch, batch_idx: int) -> None:
        seqs = self.training_sequences(batch)
        if seqs is None:
            self.update(None, self.loss)
            return
        logged = self.update(*self.with_reference(seqs))
        if {"desirable_reward", "undesirable_reward"} <= set(logged):
            self.log("train/margin", logged["desirable_reward"] - logged["undesirable_reward"], batch_size=1)

    def with_reference(self, seqs: Sequences) -> tuple[Sequences, Any]:
        """The sequences of a whole step beside what the reference says of them, and their loss."""
        seqs = seqs.replace(ref_sums=self.reference_logps(seqs))
        assert seqs.labels is not None
        share = float(seqs.labels.float().mean())
        return seqs, partial(self.loss, reference_point=self.reference_point(seqs), desirable_share=share)

    def reference_point(self, seqs: Sequences) -> float:
        """z of the sequences of a whole step."""
        others = mismatched(seqs)
        if others is None:
            return 0.0
        assert self.policy is not None
        log_ratios = others.sum_per_sequence(self.score(self.policy, others)) - self.reference_logps(others)
        return float(kto_reference_point(log_ratios.sum(), torch.tensor(len(others))))

    def loss(
        self, seqs: Sequences, *, reference_point: float = 0.0, desirable_share: float = 0.5
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Unreduced loss [B] of a micro-batch, and what is logged of it.

        Args:
            seqs: a micro-batch.
            reference_point: z of the whole step.
            desirable_share: of the sequences of the whole step.
        """
        assert seqs.labels is not None and seqs.ref_sums is not None
        logps, _ = self.logps(seqs)
        sums, labels = seqs.sum_per_sequence(logps), seqs.labels
        loss = self.kto_loss(sums - seqs.ref_sums, labels, reference_point)
        rewards, sums = self.kto_loss.rewards((sums - seqs.ref_sums).detach()), sums.detach()
        above = rewards > self.kto_loss.beta * reference_point
        logged = {"label_accuracy": (above == labels).float(), "kl": torch.full_like(sums, reference_point)}
        # a mean over one kind is what the mean over all makes of values that are 0 on the other
        for name, kind, share in (
            ("desirable", labels, desirable_share),
            ("undesirable", ~labels, 1 - desirable_share),
        ):
            if share:
                logged |= {f"{name}_reward": rewards * kind / share, f"{name}_logps": sums * kind / share}
        return loss, logged

    def measure(self, seqs: Sequences) -> dict[str, Tensor]:
        return self.evaluate(*self.with_reference(seqs))

    def weight_of(self, name: str, seqs: Sequences) -> int:
        assert seqs.labels is not None
        kind, _, _ = name.partition("_")
        if kind in ("desirable", "undesirable"):
            return int((seqs.labels == (kind == "desirable")).sum())
        return len(seqs)

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        if {"desirable_reward", "undesirable_reward"} <= set(means):
            means["margin"] = means["desirable_reward"] - means["undesirable_reward"]
        return means


def mismatched(seqs: Sequences) -> Sequences | None:
    """Each prompt with an answer to the next prompt that differs, in a circle.

    The k-th sample of a prompt gets the k-th answer to the next one, so that of pairs both kinds of answers count.
    A sequence is a prompt up to its first action, and an answer from there on. None of the results is longer than the
    longest of the given ones: an answer is cut behind a prompt that leaves it no room. None if all prompts are alike.
    """
    ids, mask = (x.split(seqs.lengths.tolist()) for x in (seqs.input_ids, seqs.action_mask))
    starts = [int(m.int().argmax()) for m in mask]  # of the answers
    prompts = [tuple(x[:start].tolist()) for x, start in zip(ids, starts, strict=True)]
    samples: dict[tuple[int, ...], list[int]] = {}  # of each prompt
    for i, prompt in enumerate(prompts):
        samples.setdefault(prompt, []).append(i)
    if len(samples) < 2:
        return None
    distinct = list(samples)
    following = dict(zip(distinct, distinct[1:] + distinct[:1], strict=True))
    longest, num_seen = int(seqs.lengths.max()), dict.fromkeys(distinct, 0)
    new_ids, new_masks = [], []
    for i, prompt in enumerate(prompts):
        answers = samples[following[prompt]]
        j = answers[num_seen[prompt] % len(answers)]
        num_seen[prompt] += 1
        room = longest - starts[i]
        new_ids.append([*prompt, *ids[j][starts[j] :][:room].tolist()])
        new_masks.append([False] * starts[i] + mask[j][starts[j] :][:room].tolist())
    return Sequences.from_lists(new_ids, new_masks, temperature=seqs.temperature)
