"""The reward model: a scalar at the last token, larger for chosen answers than for rejected ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from rl2lightning.algorithms.pairs import check_pairs, on_both_halves, pair_units, split_pairs
from rl2lightning.algorithms.preference import PreferenceModule
from rl2lightning.functional.losses import reward_model_loss
from rl2lightning.models.attention import move
from rl2lightning.models.heads import ScalarModel
from rl2lightning.types import ChatBatch, Sequences


class RM(PreferenceModule):
    """Bradley-Terry reward model on pairs of a chosen and a rejected answer (Ouyang et al., 2022, arXiv:2203.02155).

    A causal LM gets a scalar head, without bias and without dropout, which is read at the last token of each half. The
    loss of a pair is -log sigmoid(r_c - r_r - margin) + centering * (r_c + r_r)^2.

    Args:
        margin: by how much the chosen answer is to win where the data has no margin of its own. Negative, here as
            in the data: losing by as much costs no more than a tie does without a margin.
        centering: pulls rewards towards 0, which differences leave open (arXiv:2312.09244 takes 0.01).
        **kwargs: see `PostTrainingModule`; `model` may hold a causal LM, which gets a new head, or a reward model.
    """

    predicts_completions = False
    shown = ("loss", "accuracy")

    def __init__(self, *args: Any, margin: float = 0.0, centering: float = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if centering < 0:
            raise ValueError(f"centering={centering} must not be negative: it would drive rewards apart")
        self.margin, self.centering = margin, centering
        self.reward_model: ScalarModel | None = None
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

    def check(self, seqs: Sequences) -> None:
        check_pairs(seqs)

    def margins(self, seqs: Sequences) -> Tensor:
        if seqs.margins is None:
            return torch.full((len(seqs),), self.margin)
        return seqs.margins.nan_to_num(nan=self.margin)  # of rows without one

    def training_step(self, batch: ChatBatch, batch_idx: int) -> None:
        self.update(self.training_sequences(batch), self.loss)

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

    def measure(self, seqs: Sequences) -> dict[str, Tensor]:
        rewards = self.rewards(seqs)
        losses, rewards = self.pair_loss(seqs, rewards), rewards.double()  # squares far from 0 still tell the spread
        chosen, rejected = split_pairs(rewards)
        measured = {
            "loss": losses.double(),
            "accuracy": (chosen > rejected).double(),
            "margin": chosen - rejected,
            "chosen_reward": chosen,
            "rejected_reward": rejected,
            "reward_mean": rewards,
            "reward_std": rewards.square(),  # until `finish`
        }
        return {name: x.mean() for name, x in measured.items()}

    def finish(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        if means:
            means["reward_std"] = (means["reward_std"] - means["reward_mean"].square()).clamp(min=0).sqrt()
        return means

    def predict_step(self, batch: ChatBatch, batch_idx: int) -> list[dict[str, Any]]:  # type: ignore[override]
        """Rewards of the held-out pairs; they are written to `scores.jsonl` of the run."""
        seqs, _ = self.gather(batch)
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
