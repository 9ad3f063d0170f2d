"""Named, weighted rewards of whole trajectories, and how they are combined."""

from rl2lightning.rewards.base import (
    FunctionReward,
    FunctionTransform,
    GroupNormalisedSum,
    Reward,
    RewardTransform,
    Scored,
    WeightedSum,
    score,
)
from rl2lightning.rewards.code import CodeTests
from rl2lightning.rewards.format import RegexReward
from rl2lightning.rewards.length import LengthPenalty, SoftOverlong
from rl2lightning.rewards.math import ExactMatch, MathAnswer
from rl2lightning.rewards.model import RewardModel
from rl2lightning.rewards.remote import ClassifyReward, RemoteReward

__all__ = [
    "ClassifyReward",
    "CodeTests",
    "ExactMatch",
    "FunctionReward",
    "FunctionTransform",
    "GroupNormalisedSum",
    "LengthPenalty",
    "MathAnswer",
    "RegexReward",
    "RemoteReward",
    "Reward",
    "RewardModel",
    "RewardTransform",
    "Scored",
    "SoftOverlong",
    "WeightedSum",
    "score",
]
