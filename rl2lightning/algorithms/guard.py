"""Steps whose loss or gradient is not finite: skipped where they happen, counted, the end of a run if they stay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from rl2lightning.types import NonFiniteError


class NonFiniteGuard:
    """Skips non-finite optimizer steps without making the host wait for the device.

    A fused optimizer reads `found_inf` inside its kernel, as under a gradient scaler, and leaves weights and state
    alone. The counts live on the device; the host looks at those of the step before, which has ended by then.

    Args:
        max_in_a_row: raise after this many skipped steps in a row.
    """

    def __init__(self, max_in_a_row: int) -> None:
        if max_in_a_row < 1:
            raise ValueError(f"max_nonfinite_steps={max_in_a_row} must be at least 1")
        self.max_in_a_row = max_in_a_row
        self._counts: Tensor | None = None  # [2] on the device: skipped in all, skipped in a row
        self._seen: Tensor | None = None  # their copy in host memory
        self._event: torch.cuda.Event | None = None

    @property
    def skipped(self) -> Tensor:
        """Steps skipped so far, on the device."""
        return torch.zeros(()) if self._counts is None else self._counts[0].clone()

    def state_dict(self) -> dict[str, float]:
        skipped, in_a_row = (0.0, 0.0) if self._counts is None else self._counts.tolist()
        return {"skipped": skipped, "in_a_row": in_a_row}

    def load_state_dict(self, state_dict: dict[str, float]) -> None:
        self._counts = torch.tensor([state_dict["skipped"], state_dict["in_a_row"]])
        self._seen = self._event = None

    def before_step(self, optimizer: Optimizer, finite: Tensor | None) -> None:
        """Tells the optimizer whether to skip; None: a step without gradients, of which nothing is to be said."""
        if finite is None:
            optimizer.found_inf = None  # type: ignore[attr-defined]
            return
        bad = (~finite).float()
        skipped, in_a_row = torch.zeros(2, device=bad.device) if self._counts is None else self._counts
        self._counts = torch.stack([skipped + bad, (in_a_row + 1) * bad])
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            # where the parameters are: in host memory, if they are kept there
            optimizer.found_inf = bad.to(optimizer.param_groups[0]["params"][0].device)  # type: ignore[attr-defined]
        elif bool(bad):  # an optimizer of the user's own: here the host has to know
            optimizer.zero_grad(set_to_none=True)

    def after_step(self) -> None:
        """Raises if the step before this one was the last straw, then notes this one."""
        if self._seen is not None:
            if self._event is not None:
                self._event.synchronize()
            if self._seen[1] >= self.max_in_a_row:
                raise NonFiniteError(
                    f"{int(self._seen[1])} optimizer steps in a row had a non-finite loss or gradient and were "
                    "skipped; lower model.optimizer.lr, look at the last steps' data, or raise max_nonfinite_steps"
                )
        if self._counts is None:
            return
        if self._counts.is_cuda:
            self._seen = torch.empty(2, pin_memory=True).copy_(self._counts, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._event = event
        else:
            self._seen = self._counts
