"""Rollouts: inference engines behind one interface, and the loop that plays episodes on them."""

from rl2lightning.rollout.engine import EngineSpec, RolloutEngine, derive_seed
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutLoop, RolloutResult

__all__ = ["EngineSpec", "HFEngine", "Job", "RolloutEngine", "RolloutLoop", "RolloutResult", "derive_seed"]
