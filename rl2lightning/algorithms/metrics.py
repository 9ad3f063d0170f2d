"""What one optimizer step logs: loss and diagnostics, reduced over micro-batches and processes as the loss is."""

from __future__ import annotations

import torch
from torch import Tensor

from rl2lightning.parallel.strategy import FSDP2TPStrategy


class StepMetrics:
    """Sums over the micro-batches of a step, kept on the device.

    The loss is sum(weights * x); a diagnostic [n] becomes the mean with the same weights, a scalar the maximum.
    """

    def __init__(self) -> None:
        self.sums: dict[str, Tensor] = {}
        self.maxima: dict[str, Tensor] = {}

    def add(self, loss: Tensor, weights: Tensor, diagnostics: dict[str, Tensor]) -> None:
        values = {"loss": loss.detach(), "weight": weights.sum()}
        values |= {name: (x.detach() * weights).sum() for name, x in diagnostics.items() if x.ndim}
        for name, x in values.items():
            self.sums[name] = self.sums[name] + x if name in self.sums else x
        for name, x in diagnostics.items():
            if not x.ndim:
                self.maxima[name] = torch.maximum(self.maxima[name], x.detach()) if name in self.maxima else x.detach()

    def reduce(self, strategy: FSDP2TPStrategy) -> dict[str, Tensor]:
        """The same on every process; two small all-reduces and no wait for the device."""
        total = dict(zip(self.sums, strategy.sum_over_data(_stack(self.sums)), strict=True))
        weight = total.pop("weight")
        reduced = {name: x if name == "loss" else x / weight for name, x in total.items()}
        if self.maxima:
            reduced |= dict(zip(self.maxima, strategy.max_over_processes(_stack(self.maxima)), strict=True))
        return reduced


def _stack(values: dict[str, Tensor]) -> Tensor:
    return torch.stack([x.float() for x in values.values()])
