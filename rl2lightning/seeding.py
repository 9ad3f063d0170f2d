"""The seed of the run: what `seed_everything` was given, from which everything random of a run derives."""

from __future__ import annotations

import os


def run_seed() -> int:
    """The number that `lightning.seed_everything` (or `--seed_everything`) was called with; 0 if it was not called."""
    return int(os.environ.get("PL_GLOBAL_SEED", "0"))
