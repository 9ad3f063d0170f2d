"""What one optimizer step logs: loss and diagnostics, reduced over micro-batches and processes as the loss is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl2lightning.parallel.strategy import FSDP2TPStrategy
from rl2lightning.types import Sequences

TOKENS, SEQUENCES = "weight of tokens", "weight of sequences"  # sums kept beside those of the diagnostics


def share_of_loss(values: Tensor, micro: Sequences) -> Tensor:
    """The part of the step's loss that unreduced values have: [n], one per token, or [B], one per sequence."""
    return (values * weights_of(values, micro)).sum()


def weights_of(values: Tensor, micro: Sequences) -> Tensor:
    assert micro.weights is not None and micro.sequence_weights is not None, "`update` and `evaluate` set them"
    if values.numel() == micro.num_tokens:  # a sequence has two tokens at least, so the two are never as many
        return micro.weights
    if values.numel() == len(micro):
        return micro.sequence_weights
    raise ValueError(
        f"a loss returned {values.numel()} values for {len(micro)} sequences of {micro.num_tokens} tokens in all: it "
        "must return one for each token or one for each sequence, unreduced"
    )


def values_and_logged(returned: Any, who: str) -> tuple[Any, dict[str, Any]]:
    """What a loss, perhaps a user's own, returned, once it is known to be a pair of values and what is logged of them.

    Args:
        returned: of the call.
        who: the loss, for the error.
    """
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        return returned
    what = type(returned).__name__
    if isinstance(returned, tuple):
        what = f"tuple of {', '.join(type(x).__name__ for x in returned) or 'nothing'}"
    raise ValueError(
        f"{who} returned a {what}: it must return a pair (values, logged), a tensor of one value for each token or one "
        "for each sequence and a dict, which may be empty, of what is logged"
    )


class StepMetrics:
    """Sums over the micro-batches of a step, kept on the device.

    The loss is sum(weights * x). A diagnostic [n] or [B] becomes the mean with the weights of tokens or of sequences, a
    scalar, which may be a plain number, the maximum.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}
        self.per_sequence: set[str] = set()

    def add(self, loss: Tensor, micro: Sequences, diagnostics: Mapping[str, Tensor | float]) -> None:
        logged = {name: _tensor(name, x, loss.device) for name, x in diagnostics.items()}
        means = {name: x for name, x in logged.items() if x.ndim}
        assert micro.weights is not None and micro.sequence_weights is not None
        values = {"loss": loss.detach(), TOKENS: micro.weights.sum(), SEQUENCES: micro.sequence_weights.sum()}
        values |= {name: share_of_loss(x, micro) for name, x in means.items()}
        self.per_sequence |= {name for name, x in means.items() if x.numel() == len(micro)}
        for name, x in values.items():
            self.sums[name] = self.sums[name] + x if name in self.sums else x
        for name, x in logged.items():
            if not x.ndim:
                self.maxima[name] = torch.maximum(self.maxima[name], x) if name in self.maxima else x

    def reduce(self, strategy: FSDP2TPStrategy) -> dict[str, Tensor]:
        """The same on every process; two small all-reduces and no wait for the device."""
        total = dict(zip(self.sums, strategy.sum_over_data(_stack(self.sums)), strict=True))
        tokens, sequences = total.pop(TOKENS), total.pop(SEQUENCES)
        reduced = {name: x / (sequences if name in self.per_sequence else tokens) for name, x in total.items()}
        reduced["loss"] = total["loss"]
        if self.maxima:
            reduced |= dict(zip(self.maxima, strategy.max_over_processes(_stack(self.maxima)), strict=True))
        return reduced


def _tensor(name: str, x: Any, device: torch.device) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach()
    if isinstance(x, (bool, int, float)):
        return torch.full((), float(x), device=device)  # filled there: nothing is copied and waited for
    raise ValueError(f"a loss logs {name}={x!r}: it must be a tensor or a number")


def _stack(values: dict[str, Tensor]) -> Tensor:
    return torch.stack([x.float() for x in values.values()])
