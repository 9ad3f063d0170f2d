"""Models that give numbers instead of tokens: the rewards of sequences, the values of states."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl2lightning.models.policy import PackedModel
from rl2lightning.types import Sequences

SCALAR_HEAD = "score.weight"  # as transformers names it in models for sequence classification


class ScalarHead(nn.Linear):
    """[..., H] to [..., 1] in fp32, whatever the hidden states and the stored weight are in."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input.to(torch.float32), self.weight.to(torch.float32))


class ScalarModel(PackedModel):
    """A transformer with a scalar head: reward model or critic. Neither bias nor dropout (formulas: r and V)."""

    def forward(self, seqs: Sequences, *, at: Literal["actions", "last"]) -> Tensor:
        """One number for each action, or for each sequence.

        Args:
            seqs: a micro-batch prepared by `pack`.
            at: actions: the value of the state each action was taken in, that is at the token before it. last: the
                reward of each sequence, at its last token.

        Returns:
            fp32: [n] values, 0 off actions; or [B] rewards.
        """
        layout = seqs.layout
        hidden = self.hidden_states(seqs)
        rows = layout.predictors if at == "actions" else layout.last_rows
        numbers = self.lm.score(hidden[rows]).squeeze(-1)  # type: ignore[operator]
        if at == "actions":
            return layout.scatter_actions(numbers, seqs.num_tokens)
        return layout.scatter_last(numbers, len(seqs))

    @property
    def full_precision(self) -> list[nn.Module]:
        return [self.lm.score]  # type: ignore[list-item]
