"""What `trainer.precision` means to FSDP2: a policy of parameter and reduction types, no autocast."""

from __future__ import annotations

import torch
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from torch.distributed.fsdp import MixedPrecisionPolicy


class BF16MixedPrecision(Precision):
    """`bf16-mixed` as FSDP2 means it: fp32 sharded masters, bf16 compute, fp32 gradient reduction; no autocast."""

    precision = "bf16-mixed"


class BF16TruePrecision(Precision):
    """`bf16-true`: bf16 parameters; statistics and losses stay fp32, so no default type is changed."""

    precision = "bf16-true"


def translate(plugin: Precision | None) -> Precision | None:
    """Lightning's precision plugin as one of ours."""
    name = "32-true" if plugin is None else plugin.precision
    if isinstance(plugin, MixedPrecision) and name == "bf16-mixed":
        return BF16MixedPrecision()
    if isinstance(plugin, HalfPrecision) and name == "bf16-true":
        return BF16TruePrecision()
    if name not in ("32-true", "bf16-mixed", "bf16-true"):
        raise ValueError(f"trainer.precision={name} is not supported: use 32-true, bf16-mixed or bf16-true")
    return plugin


def compute_dtype(plugin: Precision) -> torch.dtype:
    return torch.float32 if plugin.precision == "32-true" else torch.bfloat16


def parameter_dtype(plugin: Precision, *, trainable: bool) -> torch.dtype:
    """fp32 masters for what is trained, unless asked otherwise; what is frozen is kept in the compute type."""
    return torch.float32 if trainable and plugin.precision != "bf16-true" else compute_dtype(plugin)


def mixed_precision_policy(plugin: Precision) -> MixedPrecisionPolicy:
    # inputs are token ids and layouts, which FSDP would take apart at every block in search of something to cast
    if compute_dtype(plugin) == torch.float32:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
