"""What a policy can talk to: environments in message space, which never see a token id."""

from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.environments.script import ScriptEnvironment

__all__ = ["Environment", "ScriptEnvironment", "StepResult"]
