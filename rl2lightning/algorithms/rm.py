"""The reward model: a scalar at the last token, larger for chosen answers than for rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torchmetrics import SumMetric

from rl2lightning.algorithms.base import PostTrainingModule
from rl2lightning.algorithms.pairs import PairMetrics, check_pairs, on_both_halves, pair_units, split_pairs
from rl2lightning.functional.losses import reward_model_loss
from rl2lightning.models.attention import move
from rl2lightning.models.heads import ScalarModel
from rl2lightning.types import ChatBatch, Sequences


class RM(PostTrainingModule):
    """Bradley-Terry reward model on pairs of a chosen and a rejected answer (Ouyang et al., 2022, arXiv:2203.02155).

    A causal LM gets a scalar head, without bias and without dropout, which is read at the last token of each half. The
    loss of a pair is -log sigmoid(r_c - r_r - margin) + centering * (r_c + r_r)^2.

    Args:
        margin: by how much the chosen answer is to win where the data has no margin of its own.
        centering: pulls rewards towards 0, which differences leave open (arXiv:2312.09244 takes 0.01).
        **kwargs: see `PostTrainingModule`; `model` may hold a causal LM, which gets a new head, or a reward model.
    """

    predicts_completions = False

    def __init__(self, *args: Any, margin: float = 0.0, centering: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if centering < 0:
            raise ValueError(f"centering={centering} must not be negative: it would drive rewards apart")
        self.margin, self.centering = margin, centering
        self.reward_model: ScalarModel | None = None
        self.held_out = PairMetrics()
        self.held_out_dropped = SumMetric(sync_on_compute=False)  # what it is given is global already
        self._predictions: list[dict[str, Any]] = []

    def build_models(self) -> None:
        self.reward_model = self.strategy.build_scalar_model(
            self.local_model_path(),
            random_init=self.random_init,
            seed=self.init_seed,
            lora=self.lora,
            name=self.model_path,
        )
        self.train_model("reward_model", self.reward_model, self.optimizer_config)

    def check_turns(self, max_turns: int) -> None:
        raise ValueError("RM has no policy that could generate: take RolloutCallback out of trainer.callbacks")

    def units(self, seqs: Sequences) -> list[list[int]]:
        return pair_units(seqs)

    # ---- training

    def training_step(self, batch: ChatBatch, batch_idx: int) -> None:
        seqs, num_dropped = self.pairs_of(batch)
        self.report_lost(
            seqs,
            num_dropped,
            nothing_left="every pair of this step was dropped, as empty, the same in both halves or cut off by "
            "data.max_length: nothing was learned",
        )
        self.update(seqs, self.loss)

    def pairs_of(self, batch: ChatBatch) -> tuple[Sequences | None, int]:
        """The pairs of the step, each with a margin, and how many were dropped: the same on every process."""
        if not isinstance(batch, ChatBatch):
            raise ValueError("RM learns from pairs of a chosen and a rejected answer: use PreferenceDataModule")
        mine = batch.sequences
        if mine is not None:  # filled in before the gather: the rows of some processes may have margins, others none
            mine = mine.replace(margins=self._margins(mine))
        seqs = self.strategy.gather_sequences(mine)
        if seqs is not None:
            check_pairs(seqs)
        return seqs, sum(self.strategy.gather_objects(batch.num_dropped))

    def _margins(self, seqs: Sequences) -> Tensor:
        if seqs.margins is None:
            return torch.full((len(seqs),), self.margin)
        return seqs.margins.nan_to_num(nan=self.margin)  # of rows without one

    def loss(self, seqs: Sequences) -> tuple[Tensor, dict[str, Tensor]]:
        """Unreduced loss [B] of a micro-batch of pairs, on both halves of each, and what is logged of it."""
        assert self.reward_model is not None
        seqs = self.reward_model.pack(seqs, self.device, self.strategy.compute_dtype)
        rewards = self.reward_model(seqs, at="last")
        chosen, rejected = split_pairs(rewards)
        logged = {
            "accuracy": (chosen > rejected).float(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }
        return on_both_halves(self.pair_loss(seqs, rewards)), {k: on_both_halves(x) for k, x in logged.items()}

    def pair_loss(self, seqs: Sequences, rewards: Tensor) -> Tensor:
        """[P] of rewards [2P]; override it to try another."""
        assert seqs.margins is not None
        margins, _ = split_pairs(seqs.margins)
        return reward_model_loss(*split_pairs(rewards), margin=margins, centering=self.centering)

    # ---- validation, test and prediction

    def rewards(self, seqs: Sequences) -> Tensor:
        """[B] reward of each of all `seqs`, on the CPU of every process, without gradients."""
        assert self.reward_model is not None
        out = torch.zeros(len(seqs), device=self.device)
        plan = self.micro_batches(seqs, training=False)
        with self.strategy.scoring(self.reward_model):
            for indices, micro in zip(plan, self.ready(self.reward_model, seqs, plan), strict=True):
                rewards = self.reward_model(micro, at="last")
                if indices:
                    out[move(torch.tensor(indices), self.device)] = rewards
        return self.strategy.sum_over_data(out).cpu()  # every sequence was scored by one data rank

    def validation_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        self._log_held_out("val")

    def on_test_epoch_end(self) -> None:
        self._log_held_out("test")

    def _evaluate(self, batch: ChatBatch, stage: str) -> None:
        seqs, num_dropped = self.pairs_of(batch)
        self.held_out_dropped.update(num_dropped)
        self.log(f"{stage}/dropped_samples", self.held_out_dropped, batch_size=1)
        if seqs is not None:
            rewards = self.rewards(seqs)
            self.held_out.update(rewards, self.pair_loss(seqs, rewards))

    def _log_held_out(self, stage: str) -> None:
        if not self.held_out.num_pairs:
            rank_zero_warn(f"every held-out pair was dropped: there is nothing to measure in {stage}")
            return
        for name, x in self.held_out.compute().items():  # global already; Lightning asks for `sync_dist` all the same
            shown = name in ("loss", "accuracy")
            self.log(f"{stage}/{name}", x.float(), prog_bar=shown, batch_size=1, sync_dist=True)
        self.held_out.reset()

    def predict_step(self, batch: ChatBatch, batch_idx: int) -> list[dict[str, Any]]:  # type: ignore[override]
        """Rewards of the held-out pairs; they are written to `scores.jsonl` of the run."""
        seqs, _ = self.pairs_of(batch)
        if seqs is None:
            return []
        chosen, rejected = (x.tolist() for x in split_pairs(self.rewards(seqs)))
        rows = seqs.group_ids[::2].tolist()  # positions among the held-out rows; those that were dropped are left out
        scores = [
            {"row": row, "chosen_reward": c, "rejected_reward": r}
            for row, c, r in zip(rows, chosen, rejected, strict=True)
        ]
        self._predictions += scores
        return scores

    def on_predict_epoch_end(self) -> None:
        scores, self._predictions = self._predictions, []
        directory = Path(self.trainer.log_dir or self.trainer.default_root_dir)  # a broadcast: on every process
        if self.trainer.is_global_zero:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / "scores.jsonl"
            path.write_text("".join(json.dumps(score) + "\n" for score in scores))
            rank_zero_info(f"rewards of {len(scores)} pairs written to {path}")
