"""An environment that is one plain Python file, in the manner of RL2."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.types import Message, Row
from rl2lightning.usercode import by_name, load_file

_SETTING = "environment.init_args.path"


class ScriptEnvironment(Environment):
    """A file with a `reward_fn` and, for several turns, an `interact`.

    ```python
    def reward_fn(messages, answer):          # any column of the row, by name; **columns takes the rest
        return float(messages[-1]["content"].strip() == answer)

    def interact(messages):                   # optional: new messages, [] or None ends the episode
        return [{"role": "tool", "content": run(messages[-1]["content"])}]    # may be `async def`

    TOOLS = [...]                             # optional: schemas for the chat template
    ```

    The file is run as a module of its own, in the training process: it is code you trust.

    Args:
        path: the file.
        timeout: seconds that `interact` may take, after which it has failed and its episode ends; None: as long as it
            likes.

    Raises:
        ValueError: the file is missing or cannot be imported, or `reward_fn`, `interact` or `TOOLS` is not what it
            should be.
    """

    def __init__(self, path: str, timeout: float | None = None) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"environment.init_args.timeout={timeout} must be positive, or null for no limit")
        names = vars(load_file(path, setting=_SETTING))
        if not callable(names.get("reward_fn")):
            raise ValueError(f"{_SETTING}='{path}' defines no function reward_fn(messages, answer); add one")
        if "interact" in names and not callable(names["interact"]):
            raise ValueError(f"{_SETTING}='{path}': interact is no function; write def interact(messages)")
        tools = names.get("TOOLS")
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise ValueError(f"{_SETTING}='{path}': TOOLS must be a list of schemas (dicts), got {tools!r}")
        self.path, self.timeout = path, timeout
        self._tools: list[dict[str, Any]] | None = tools
        self._reward_fn = by_name(names["reward_fn"], given=("messages",), setting=path)
        self._interact = None
        if "interact" in names:
            self._interact = by_name(names["interact"], given=("messages",), setting=path, may_be_async=True)
            self.min_turns = 2

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return self._tools

    def step(self, messages: list[Message], row: Row) -> StepResult | Awaitable[StepResult]:
        if self._interact is None:
            return StepResult(done=True)
        new = self._interact(row, messages=_copy(messages))
        return self._awaited(new) if inspect.isawaitable(new) else self._result(new)

    async def _awaited(self, new: Awaitable[Any]) -> StepResult:
        return self._result(await new)

    def _result(self, new: Any) -> StepResult:
        if new is None:
            return StepResult(done=True)
        if not isinstance(new, list) or not all(isinstance(m, dict) and "role" in m and "content" in m for m in new):
            raise ValueError(f"{self.path}: interact must return a list of messages (role, content), got {new!r}")
        return StepResult(messages=new, done=not new)

    @property
    def rewards(self) -> Mapping[str, Callable[[list[Message], Row], float]]:
        return {"reward_fn": self._reward}

    def _reward(self, messages: list[Message], row: Row) -> float:
        return self._reward_fn(row, messages=_copy(messages))


def _copy(messages: list[Message]) -> list[Message]:
    """A script may edit what it is handed; the trajectory must not notice."""
    return [dict(message) for message in messages]
