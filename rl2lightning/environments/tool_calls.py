"""How models write tool calls, and how the answers are handed back to them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from rl2lightning.types import Message


@dataclass(frozen=True)
class ToolCall:
    """One call as the model wrote it; `error` says what is wrong with one that cannot be read."""

    name: str = ""
    arguments: Any = None
    error: str | None = None


class ToolCallFormat(ABC):
    """Finds the calls in the text of an assistant's turn.

    The markers must not be special tokens of the tokenizer: those are left out of a turn's text.
    """

    @property
    @abstractmethod
    def example(self) -> str:
        """How a call is written, in words for the model."""

    @abstractmethod
    def parse(self, text: str) -> list[ToolCall]:
        """The calls in order, those that cannot be read included; [] where the turn calls nothing."""

    def instructions(self, schemas: list[dict[str, Any]]) -> str:
        """What a system message says of the tools, where the chat template does not."""
        listed = "\n".join(json.dumps(schema) for schema in schemas)
        return f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, write {self.example}"

    def answer(self, call: ToolCall, text: str, role: str) -> Message:
        """The message that carries the result of a call."""
        return {"role": role, "name": call.name or "unknown", "content": text}


@dataclass(frozen=True)
class HermesFormat(ToolCallFormat):
    """`<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`, any number in a turn: Hermes, Qwen 2.5, Qwen 3.

    What stands between `<think>` and `</think>` calls nothing. An unclosed call is one that cannot be read.
    """

    @property
    def example(self) -> str:
        return '<tool_call>{"name": the function\'s name, "arguments": {its arguments}}</tool_call>'

    def parse(self, text: str) -> list[ToolCall]:
        return [_from_json(body) for body in _blocks(_without_thinking(text), "<tool_call>", "</tool_call>")]


@dataclass(frozen=True)
class LlamaFormat(ToolCallFormat):
    """The whole turn is `{"name": "f", "parameters": {"x": 1}}`, or several separated by semicolons: Llama 3."""

    @property
    def example(self) -> str:
        return '{"name": the function\'s name, "parameters": {its arguments}} and nothing else'

    def parse(self, text: str) -> list[ToolCall]:
        text = text.strip()
        if not re.match(r'\{\s*"(?:name|type)"', text):
            return []
        calls: list[ToolCall] = []
        decoder = json.JSONDecoder()
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except json.JSONDecodeError as error:
                return [*calls, ToolCall(error=_not_json(error))]
            calls.append(_from_value(value))
            text = text[end:].lstrip(" ;\n")
        return calls


@dataclass(frozen=True)
class QwenCoderFormat(ToolCallFormat):
    """`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`: Qwen 3 Coder.

    A parameter that reads as JSON, other than a string, is taken as JSON, else as text.
    """

    @property
    def example(self) -> str:
        return "<tool_call><function=its name><parameter=name>value</parameter></function></tool_call>"

    def parse(self, text: str) -> list[ToolCall]:
        return [self._call(body) for body in _blocks(_without_thinking(text), "<tool_call>", "</tool_call>")]

    def _call(self, body: str | None) -> ToolCall:
        found = None if body is None else re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", body, re.DOTALL)
        if found is None:
            return ToolCall(error="the call must be <function=name>…</function> inside <tool_call>…</tool_call>")
        pairs = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL)
        return ToolCall(found[1], {name: _plain(value) for name, value in pairs})


@dataclass(frozen=True)
class TagFormat(ToolCallFormat):
    """One tag, one tool: `<search>who was Ada?</search>` calls `tool` with the text as `argument`, and the answer comes
    between `<information>` and `</information>` (Search-R1, arXiv:2503.09516).

    Args:
        tool: name of the tool.
        argument: its parameter.
        tag: what stands in the angle brackets.
        answer_tag: what the answer is wrapped in; empty for nothing.
    """

    tool: str
    argument: str
    tag: str = "search"
    answer_tag: str = "information"

    @property
    def example(self) -> str:
        return f"<{self.tag}>{self.argument}</{self.tag}>"

    def parse(self, text: str) -> list[ToolCall]:
        bodies = _blocks(_without_thinking(text), f"<{self.tag}>", f"</{self.tag}>")
        return [
            ToolCall(self.tool, {self.argument: body.strip()})
            if body is not None
            else ToolCall(self.tool, error=f"<{self.tag}> was not closed by </{self.tag}>")
            for body in bodies
        ]

    def answer(self, call: ToolCall, text: str, role: str) -> Message:
        if self.answer_tag:
            text = f"<{self.answer_tag}>{text}</{self.answer_tag}>"
        return super().answer(call, text, role)


def _without_thinking(text: str) -> str:
    text = re.sub(r"<think>.*?</think>", "", text, flags=re.DOTALL)
    # the template may have opened the thinking in the prompt; thinking that never ends calls nothing
    return text.rpartition("</think>")[2].partition("<think>")[0]


def _blocks(text: str, opening: str, closing: str) -> list[str | None]:
    """What stands between each pair of markers; None for one that is opened and not closed, or closed only."""
    blocks: list[str | None] = []
    while opening in text:
        before, _, text = text.partition(opening)
        if closing in before:
            blocks.append(None)
        body, closed, rest = text.partition(closing)
        if closed and opening not in body:
            blocks.append(body)
            text = rest
        else:
            blocks.append(None)
    return [*blocks, None] if closing in text else blocks


def _from_json(body: str | None) -> ToolCall:
    if body is None:
        return ToolCall(error="each call must stand between <tool_call> and </tool_call>")
    try:
        value = json.loads(body)
    except (json.JSONDecodeError, RecursionError) as error:
        return ToolCall(error=_not_json(error))
    return _from_value(value)


def _from_value(value: Any) -> ToolCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return ToolCall(error='the call must be a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # written twice, as some models were taught
        try:
            arguments = json.loads(arguments)
        except (json.JSONDecodeError, RecursionError):
            return ToolCall(value["name"], error="the arguments must be a JSON object, not a string")
    return ToolCall(value["name"], arguments)


def _not_json(error: Exception) -> str:
    where = f": {error.msg} at character {error.pos}" if isinstance(error, json.JSONDecodeError) else ""
    return f"the call is not valid JSON{where}"


def _plain(text: str) -> Any:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError):
        return text
    return text if isinstance(value, str) else value
