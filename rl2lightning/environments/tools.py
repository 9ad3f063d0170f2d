"""An environment of tools: the policy calls typed Python functions, and reads what they return."""

from __future__ import annotations

import copy
import inspect
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Literal

from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.environments.tool_calls import HermesFormat, ToolCall, ToolCallFormat
from rl2lightning.environments.tool_runners import ThreadRunner, ToolFailed, ToolRunner
from rl2lightning.environments.tool_schema import Schema, check_arguments, function_schema
from rl2lightning.types import Message, Row
from rl2lightning.usercode import load_function

_SETTING = "environment.init_args.tools"
_FAILURES = ("raised", "timeout", "garbage")  # the tool's fault; anything else is the model's
_log = logging.getLogger(__name__)


class Tool(ABC):
    """Something to call. Called from several threads at a time; returns text, or what JSON can express.

    Args:
        schema: its name, description and parameters, see `function_schema`.
        timeout: seconds that one call may take.
    """

    target: str | None = None  # import path by which another process finds it
    is_async: bool = False  # whether a call gives a coroutine
    isolated: bool = False  # whether it does its work outside this process already

    def __init__(self, schema: Schema, timeout: float) -> None:
        if timeout <= 0:
            raise ValueError(f"tool '{schema['function']['name']}': timeout={timeout} must be positive")
        self.schema, self.timeout = schema, timeout

    @property
    def name(self) -> str:
        return self.schema["function"]["name"]

    @abstractmethod
    def __call__(self, arguments: dict[str, Any]) -> Any:
        """The result, or a coroutine that gives it. The arguments fit the schema."""


class FunctionTool(Tool):
    """A typed Python function, plain or `async def`; its docstring describes it to the model.

    Args:
        function: "package.module.function", "path/file.py:function", or in Python the function itself.
        timeout: seconds that one call may take.
        name: what the model calls it; by default the function's name.
    """

    def __init__(self, function: str | Callable[..., Any], timeout: float = 10.0, name: str | None = None) -> None:
        loaded = load_function(function, setting=_SETTING) if isinstance(function, str) else function
        super().__init__(function_schema(loaded, name=name), timeout)
        self.target = function if isinstance(function, str) else None
        self.is_async = inspect.iscoroutinefunction(loaded)
        self._function = loaded

    def __call__(self, arguments: dict[str, Any]) -> Any:
        return self._function(**arguments)


@dataclass(frozen=True)
class _Outcome:
    call: ToolCall
    text: str
    cause: str | None = None  # why it is an error


class ToolEnvironment(Environment):
    """Runs the tools an assistant turn calls and answers with one message a call; a turn without calls is the last.

    A call that cannot be read, names no tool or has wrong arguments is answered by an error message, from which the
    model can learn. So is a tool that fails (raises, takes too long, returns neither text nor JSON), unless
    `on_tool_error` is `end`; never does it end the run. Counted, as means over trajectories, are `rollout/tool_calls`,
    `rollout/tool_errors` and each cause by itself.

    Set `max_turns` of the callback to at least 2: one turn to call, one to answer. Calls of the last turn are not run,
    so with one turn none is, of which there is a warning.

    Args:
        tools: functions by import path ("tools.py:calculator", "package.module.function"), or `Tool`s; in Python also
            functions themselves.
        format: how the model writes its calls.
        runner: where tools run; None: in threads of this process.
        max_calls: most calls in one trajectory; further ones are answered by an error. None: no limit but that of
            the turns.
        max_calls_per_turn: most calls in one turn; what comes after them is answered by one error.
        max_chars: longer results are cut, and say so.
        call_cost: subtracted from the reward for every call.
        success_reward: added for every call that gave a result.
        error_reward: added for every call that did not; usually negative.
        on_tool_error: what a failing tool means for its trajectory: the model is told, or it ends there.
        role: of the messages that carry results; `user` for chat templates that know no tools.
        describe: where the model reads what tools there are: `template` hands the schemas to the chat template,
            `system` puts them into a system message, for templates that ignore them, `none` leaves it to the data.
    """

    min_turns = 2

    def __init__(
        self,
        tools: Sequence[str | Tool] | Sequence[Callable[..., Any]],
        format: ToolCallFormat | None = None,
        runner: ToolRunner | None = None,
        max_calls: int | None = None,
        max_calls_per_turn: int = 8,
        max_chars: int = 4000,
        call_cost: float = 0.0,
        success_reward: float = 0.0,
        error_reward: float = 0.0,
        on_tool_error: Literal["continue", "end"] = "continue",
        role: Literal["tool", "user"] = "tool",
        describe: Literal["template", "system", "none"] = "template",
    ) -> None:
        loaded = [tool if isinstance(tool, Tool) else FunctionTool(tool) for tool in tools]
        if not loaded:
            raise ValueError(f"{_SETTING} is empty; name at least one function")
        self._tools = {tool.name: tool for tool in loaded}
        if len(self._tools) < len(loaded):
            name, _ = Counter(tool.name for tool in loaded).most_common(1)[0]
            raise ValueError(f"{_SETTING}: two tools are named '{name}'; set the name of one of them")
        for what, value in (("max_calls_per_turn", max_calls_per_turn), ("max_chars", max_chars)):
            if value < 1:
                raise ValueError(f"environment.init_args.{what}={value} must be at least 1")
        self.format = format or HermesFormat()
        self.runner = runner or ThreadRunner()
        for tool in loaded:
            self.runner.check(tool)
        self.max_calls, self.max_calls_per_turn, self.max_chars = max_calls, max_calls_per_turn, max_chars
        self.call_cost, self.success_reward, self.error_reward = call_cost, success_reward, error_reward
        self.on_tool_error, self.role, self.describe = on_tool_error, role, describe

    @property
    def tools(self) -> list[Schema] | None:
        return self._schemas() if self.describe == "template" else None

    def reset(self, row: Row) -> list[Message]:
        messages: list[Message] = list(row["messages"])
        if self.describe != "system":
            return messages
        text = self.format.instructions(self._schemas())
        if messages and messages[0]["role"] == "system":
            return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
        return [{"role": "system", "content": text}, *messages]

    def step(self, messages: list[Message], row: Row) -> StepResult:
        calls = self.format.parse(messages[-1]["content"])
        if not calls:
            return StepResult(done=True)
        outcomes = self._run(calls, self._num_earlier_calls(messages, row))
        errors = Counter(outcome.cause for outcome in outcomes if outcome.cause is not None)
        num_errors = errors.total()
        return StepResult(
            messages=[self.format.answer(outcome.call, outcome.text, self.role) for outcome in outcomes],
            reward=(len(outcomes) - num_errors) * self.success_reward
            + num_errors * self.error_reward
            - len(outcomes) * self.call_cost,
            done=self.on_tool_error == "end" and any(errors[cause] for cause in _FAILURES),
            counts={"tool_calls": len(outcomes), "tool_errors": num_errors}
            | {f"tool_errors/{cause}": number for cause, number in errors.items()},
        )

    def _run(self, calls: list[ToolCall], num_earlier: int) -> list[_Outcome]:
        """The outcomes of a turn's calls, in their order; those that need a tool run side by side."""
        run, left_out = calls[: self.max_calls_per_turn], calls[self.max_calls_per_turn :]
        left = len(run) if self.max_calls is None else max(0, self.max_calls - num_earlier)
        outcomes = self._side_by_side(run[:left])
        outcomes += [_error(call, "no_calls_left", f"no more than {self.max_calls} calls") for call in run[left:]]
        if left_out:
            limit = f"no more than {self.max_calls_per_turn} calls in one turn; {len(left_out)} were left out"
            outcomes.append(_error(left_out[0], "too_many_calls", limit))
        return outcomes

    def _side_by_side(self, calls: list[ToolCall]) -> list[_Outcome]:
        if len(calls) < 2:
            return [self._call(call) for call in calls]
        with ThreadPoolExecutor(len(calls), thread_name_prefix="tool-calls") as pool:
            return list(pool.map(self._call, calls))

    def _call(self, call: ToolCall) -> _Outcome:
        if call.error is not None:
            return _error(call, "malformed", call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            return _error(call, "unknown_tool", f"no tool '{call.name[:60]}'; there are: {', '.join(self._tools)}")
        if (wrong := check_arguments(tool.schema, call.arguments)) is not None:
            return _error(call, "bad_arguments", f"{tool.name}: {wrong}")
        try:
            return _Outcome(call, self.runner.run(tool, call.arguments, max_chars=self.max_chars))
        except ToolFailed as error:
            _log.debug("tool '%s' failed (%s): %s", tool.name, error.cause, error, exc_info=error)
            return _error(call, error.cause, f"{tool.name}: {error}"[: self.max_chars])

    def _num_earlier_calls(self, messages: list[Message], row: Row) -> int:
        """Calls of this trajectory before its last turn: the messages are all there is to know of an episode."""
        if self.max_calls is None:
            return 0
        played = messages[len(self.reset(row)) : -1]
        turns = (self.format.parse(message["content"]) for message in played if message["role"] == "assistant")
        return sum(min(len(calls), self.max_calls_per_turn) for calls in turns)

    def _schemas(self) -> list[Schema]:
        return [copy.deepcopy(tool.schema) for tool in self._tools.values()]  # a template may edit them


def _error(call: ToolCall, cause: str, message: str) -> _Outcome:
    return _Outcome(call, f"Error: {message}", cause)
