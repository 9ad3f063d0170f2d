"""The interface of an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rl2lightning.types import Message, Row


@dataclass(frozen=True)
class StepResult:
    """What the environment answers to an assistant turn.

    Args:
        messages: what it says; with none the episode ends.
        reward: for that assistant turn, trained on as it is, beside the named rewards of the whole episode.
        done: the episode ends here, whatever it says.
        counts: what happened, by name; logged as `rollout/<name>`, summed over turns, averaged over trajectories.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    counts: Mapping[str, float] = field(default_factory=dict)


class Environment(ABC):
    """Answers assistant turns with messages. One object serves all episodes, from several threads at a time, so the
    state of an episode belongs into the messages or under a key of its own.

    A subclass for a single-turn task overrides nothing but `step`, which is not called after the last turn allowed.

    `reset` and `step` may be `async def`: all coroutines share one event loop, which outlives the rollout. They must
    come to an end by themselves, unless `timeout` is set: then an episode that waits longer has failed, and where it
    waits in a thread, that thread is left behind.
    """

    min_turns: int = 1  # 2 in a class whose `step` answers: a run that allows fewer is warned that nobody asks it
    timeout: float | None = None  # seconds that `reset` and `step` may take; None: as long as they like

    def reset(self, row: Row) -> list[Message] | Awaitable[list[Message]]:
        """The messages an episode begins with: by default the row's."""
        return row["messages"]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Schemas of the tools, as the chat template expects them."""
        return None

    @abstractmethod
    def step(self, messages: list[Message], row: Row) -> StepResult | Awaitable[StepResult]:
        """The answer to `messages`, the last of which is the assistant's. May block: it runs in a thread."""

    @property
    def rewards(self) -> Mapping[str, Callable[[list[Message], Row], float]]:
        """Named functions that score a finished episode, for environments that bring their own reward."""
        return {}
