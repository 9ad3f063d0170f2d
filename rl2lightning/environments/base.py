"""The interface of an environment."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """Answers assistant turns with messages. One object serves all episodes, from several threads at a time, so the
    state of an episode belongs into the messages or under a key of its own.

    A subclass for a single-turn task overrides nothing but `step`, which is not called after the last turn allowed.
    """

    def reset(self, row: Row) -> list[Message]:
        """The messages an episode begins with: by default the row's."""
        return row["messages"]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Schemas of the tools, as the chat template expects them."""
        return None

    @abstractmethod
    def step(self, messages: list[Message], row: Row) -> StepResult:
        """The answer to `messages`, the last of which is the assistant's. May block: it runs in a thread."""

    @property
    def rewards(self) -> Mapping[str, Callable[[list[Message], Row], float]]:
        """Named functions that score a finished episode, for environments that bring their own reward."""
        return {}
