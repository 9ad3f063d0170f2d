"""Every shim for an upstream version: what it is for and when it can go."""

from __future__ import annotations

import functools
import inspect
from typing import Any


@functools.cache
def varlen_gqa_kwargs() -> dict[str, Any]:
    """torch 2.13 wants grouped queries announced, torch 2.11 infers them. Remove when torch >= 2.13 is required."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
