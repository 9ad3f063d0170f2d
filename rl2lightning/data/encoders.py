"""Rows to batches: what a row must look like, and the `Sequences` or prompts it becomes. Runs in loader workers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from rl2lightning.data.chat import Encoded, TrainOn, as_messages, encode_chat, encode_prompt, encode_turns, row_tools
from rl2lightning.data.sources import require
from rl2lightning.types import ChatBatch, Message, PromptBatch, Row, Sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PlacedRow = tuple[int, Row, str]  # position in the pass, the row as the source has it, how an error names it


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Puts the row's name before whatever is wrong with it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class RowEncoder(ABC):
    """What a kind of data set holds and what a step takes of it."""

    @abstractmethod
    def normalise(self, row: Row) -> Row:
        """The row with its columns under our names and types; ValueError where it lacks one or has it wrong."""

    def keeps(self, row: Row) -> bool:
        """Whether a normalised row is used at all."""
        return True

    def prompt_row(self, row: Row) -> Row:
        """A normalised row with only the prompt left in `messages`, to sample a completion for."""
        return row

    @abstractmethod
    def __call__(self, rows: Sequence[PlacedRow]) -> Any:
        """The batch of these rows, none of them on a rank that has no share."""


@dataclass(frozen=True)
class PromptEncoder(RowEncoder):
    """Conversations that wait for an assistant turn, with whatever columns the reward needs.

    Args:
        tokenizer: needed for `max_prompt_length` only.
        max_prompt_length: longer prompts, in tokens, are not kept.
    """

    tokenizer: PreTrainedTokenizerBase | None
    max_prompt_length: int | None
    apply_chat_template: bool
    messages_key: str
    answer_key: str | None

    def normalise(self, row: Row) -> Row:
        messages = as_messages(require(row, self.messages_key, "data.messages_key"), key=self.messages_key)
        _refuse_answer(messages, self.messages_key)
        row = {**_without(row, self.messages_key), "messages": messages}
        if self.answer_key is not None:
            answer = require(row, self.answer_key, "data.answer_key (null where there are no answers)")
            row = {**_without(row, self.answer_key), "answer": answer}
        return row

    def keeps(self, row: Row) -> bool:
        if self.tokenizer is None or self.max_prompt_length is None:
            return True
        ids = encode_prompt(
            self.tokenizer, row["messages"], tools=row_tools(row), apply_chat_template=self.apply_chat_template
        )
        return len(ids) <= self.max_prompt_length

    def __call__(self, rows: Sequence[PlacedRow]) -> PromptBatch:
        return as_prompts(self, rows)


@dataclass(frozen=True)
class PromptsOf(RowEncoder):
    """The prompts of another kind of data set, to sample completions for."""

    encoder: RowEncoder

    def normalise(self, row: Row) -> Row:
        return self.encoder.prompt_row(self.encoder.normalise(row))

    def __call__(self, rows: Sequence[PlacedRow]) -> PromptBatch:
        return as_prompts(self, rows)


def as_prompts(encoder: RowEncoder, rows: Sequence[PlacedRow]) -> PromptBatch:
    normalised = []
    for _, row, where in rows:
        with naming(where):
            normalised.append(encoder.normalise(row))
    return PromptBatch(rows=normalised, indices=[position for position, _, _ in rows])


@dataclass(frozen=True)
class ChatEncoder(RowEncoder):
    """Conversations that end with an assistant turn; see `ChatDataModule` for the arguments."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    train_on: TrainOn
    apply_chat_template: bool
    messages_key: str
    prompt_key: str | None
    response_key: str | None

    def normalise(self, row: Row) -> Row:
        if self.prompt_key is not None and self.response_key is not None:
            prompt = as_messages(require(row, self.prompt_key, "data.prompt_key"), key=self.prompt_key)
            _refuse_answer(prompt, self.prompt_key, "data.prompt_key")
            response = require(row, self.response_key, "data.response_key")
            messages = prompt + as_messages([{"role": "assistant", "content": response}], key=self.response_key)
            row = _without(row, self.prompt_key, self.response_key)
        else:
            messages = as_messages(require(row, self.messages_key, "data.messages_key"), key=self.messages_key)
            row = _without(row, self.messages_key)
        if messages[-1]["role"] != "assistant":
            raise ValueError(f"the conversation must end with an assistant turn, not with {messages[-1]['role']}")
        return {**row, "messages": messages}

    def prompt_row(self, row: Row) -> Row:
        return {**row, "messages": row["messages"][:-1]}

    def __call__(self, rows: Sequence[PlacedRow]) -> ChatBatch:
        kept: list[tuple[int, Encoded]] = []  # position of the conversation, one of its sequences
        truncated: list[bool] = []
        prompts: list[Row] = []
        num_dropped = 0
        for position, raw, where in rows:
            with naming(where):
                row = self.normalise(raw)
                sequences = encode_chat(
                    self.tokenizer,
                    row["messages"],
                    train_on=self.train_on,
                    apply_chat_template=self.apply_chat_template,
                    tools=row_tools(row),
                )
            if len(row["messages"]) > 1:  # text without a prompt has nothing to sample from
                prompts.append(self.prompt_row(row))
            for ids, mask in sequences:
                if any(mask[: self.max_length]):
                    kept.append((position, (ids[: self.max_length], mask[: self.max_length])))
                    truncated.append(len(ids) > self.max_length)
                else:
                    num_dropped += 1
        if not kept:
            return ChatBatch(sequences=None, rows=prompts, num_dropped=num_dropped)
        sequences = Sequences.from_lists(
            [ids for _, (ids, _) in kept],
            [mask for _, (_, mask) in kept],
            [position for position, _ in kept],
            truncated=torch.tensor(truncated),
        )
        return ChatBatch(sequences=sequences, rows=prompts, num_dropped=num_dropped)


@dataclass(frozen=True)
class PreferenceEncoder(RowEncoder):
    """A prompt with a chosen and a rejected continuation; see `PreferenceDataModule` for the arguments."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    apply_chat_template: bool
    messages_key: str | None
    chosen_key: str
    rejected_key: str
    margin_key: str

    def normalise(self, row: Row) -> Row:
        chosen = require(row, self.chosen_key, "data.chosen_key")
        rejected = require(row, self.rejected_key, "data.rejected_key")
        if self.messages_key is not None and row.get(self.messages_key) is not None:
            prompt = as_messages(row[self.messages_key], key=self.messages_key)
            self._refuse_whole(prompt, self.messages_key, chosen, rejected)
            _refuse_answer(prompt, self.messages_key)
        else:
            prompt = self._shared_prefix(chosen, rejected)
        margin = row.get(self.margin_key)
        if margin is not None and (isinstance(margin, bool) or not isinstance(margin, (int, float))):
            raise ValueError(f"{self.margin_key!r} must be a number, not {margin!r}")
        return {
            **_without(row, self.messages_key, self.chosen_key, self.rejected_key, self.margin_key),
            "messages": prompt,
            "chosen": _continuation(chosen, prompt, self.chosen_key),
            "rejected": _continuation(rejected, prompt, self.rejected_key),
            "margin": None if margin is None else float(margin),
        }

    def _refuse_whole(self, prompt: list[Message], key: str, chosen: Any, rejected: Any) -> None:
        """Refuses as a prompt one of the two whole conversations, after which nothing of it would be left to train."""
        if prompt[-1]["role"] != "assistant" or isinstance(chosen, str) or isinstance(rejected, str):
            return
        for name, answer in ((self.chosen_key, chosen), (self.rejected_key, rejected)):
            whole = as_messages(answer, key=name) if answer else []
            if whole and prompt[: len(whole)] == whole:
                raise ValueError(
                    f"column {key!r} already holds the answer of {name!r}; set data.messages_key to null (the prompt "
                    f"is then what {self.chosen_key!r} and {self.rejected_key!r} share) or to the column of the prompt "
                    "alone"
                )

    def _shared_prefix(self, chosen: Any, rejected: Any) -> list[Message]:
        """The prompt of two whole conversations: the turns in which they agree."""
        if isinstance(chosen, str) or isinstance(rejected, str):
            missing = "data.messages_key is null" if self.messages_key is None else f"no {self.messages_key!r}"
            raise ValueError(
                f"{missing}, and {self.chosen_key!r} or {self.rejected_key!r} is no whole conversation; "
                "set data.messages_key to the column that holds the prompt"
            )
        first, second = as_messages(chosen, key=self.chosen_key), as_messages(rejected, key=self.rejected_key)
        shared = 0
        while shared < min(len(first), len(second)) - 1 and first[shared] == second[shared]:
            shared += 1
        if not shared:
            raise ValueError(f"{self.chosen_key!r} and {self.rejected_key!r} share no prompt; set data.messages_key")
        return first[:shared]

    def __call__(self, rows: Sequence[PlacedRow]) -> ChatBatch:
        halves: list[tuple[int, Encoded, float | None]] = []  # chosen, rejected, chosen, rejected …
        truncated: list[bool] = []
        prompts: list[Row] = []
        num_dropped = 0
        for position, raw, where in rows:
            with naming(where):
                row = self.normalise(raw)
                prompts.append(row)
                empty = _is_empty(row["chosen"]) or _is_empty(row["rejected"])
                pair = [] if empty else [self._encode(row, row[key]) for key in ("chosen", "rejected")]
            cut = [(ids[: self.max_length], mask[: self.max_length]) for ids, mask in pair]
            # a pair that is the same once cut teaches nothing, one without an answer left has no score
            if not cut or cut[0] == cut[1] or not all(any(mask) for _, mask in cut):
                num_dropped += 1
                continue
            halves += [(position, half, row["margin"]) for half in cut]
            truncated += [len(ids) > self.max_length for ids, _ in pair]
        if not halves:
            return ChatBatch(sequences=None, rows=prompts, num_dropped=num_dropped)
        margins = [math.nan if margin is None else margin for _, _, margin in halves]
        sequences = Sequences.from_lists(
            [ids for _, (ids, _), _ in halves],
            [mask for _, (_, mask), _ in halves],
            [position for position, _, _ in halves],
            labels=torch.tensor([i % 2 == 0 for i in range(len(halves))]),
            margins=None if all(math.isnan(m) for m in margins) else torch.tensor(margins),
            truncated=torch.tensor(truncated),
        )
        return ChatBatch(sequences=sequences, rows=prompts, num_dropped=num_dropped)

    def _encode(self, row: Row, continuation: list[Message]) -> Encoded:
        return encode_continuation(self.tokenizer, row, continuation, apply_chat_template=self.apply_chat_template)


@dataclass(frozen=True)
class UnpairedEncoder(RowEncoder):
    """A prompt with one completion and whether it is desirable; see `UnpairedDataModule` for the arguments."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    apply_chat_template: bool
    messages_key: str
    completion_key: str
    label_key: str

    def normalise(self, row: Row) -> Row:
        prompt = as_messages(require(row, self.messages_key, "data.messages_key"), key=self.messages_key)
        _refuse_answer(prompt, self.messages_key)
        completion = require(row, self.completion_key, "data.completion_key")
        label = require(row, self.label_key, "data.label_key")
        if not (isinstance(label, int) and label in (0, 1)):  # a bool is an int
            raise ValueError(
                f"{self.label_key!r} must be true (desirable) or false, or 1 or 0, not {label!r}; write it so, or set "
                "data.label_key to the column that says which"
            )
        return {
            **_without(row, self.messages_key, self.completion_key, self.label_key),
            "messages": prompt,
            "completion": _continuation(completion, prompt, self.completion_key),
            "label": bool(label),
        }

    def __call__(self, rows: Sequence[PlacedRow]) -> ChatBatch:
        kept: list[tuple[int, Encoded, bool]] = []
        truncated: list[bool] = []
        prompts: list[Row] = []
        for position, raw, where in rows:
            with naming(where):
                row = self.normalise(raw)
                prompts.append(row)
                if _is_empty(row["completion"]):
                    continue
                ids, mask = encode_continuation(
                    self.tokenizer, row, row["completion"], apply_chat_template=self.apply_chat_template
                )
            if any(mask[: self.max_length]):
                kept.append((position, (ids[: self.max_length], mask[: self.max_length]), row["label"]))
                truncated.append(len(ids) > self.max_length)
        num_dropped = len(rows) - len(kept)
        if not kept:
            return ChatBatch(sequences=None, rows=prompts, num_dropped=num_dropped)
        sequences = Sequences.from_lists(
            [ids for _, (ids, _), _ in kept],
            [mask for _, (_, mask), _ in kept],
            [position for position, _, _ in kept],
            labels=torch.tensor([label for _, _, label in kept]),
            truncated=torch.tensor(truncated),
        )
        return ChatBatch(sequences=sequences, rows=prompts, num_dropped=num_dropped)


def encode_continuation(
    tokenizer: PreTrainedTokenizerBase, row: Row, continuation: list[Message], *, apply_chat_template: bool
) -> Encoded:
    """A normalised row's prompt and what follows it, its assistant turns trained, as one sequence."""
    messages = row["messages"] + continuation
    turns = [i for i in range(len(row["messages"]), len(messages)) if messages[i]["role"] == "assistant"]
    encoded = encode_turns(tokenizer, messages, turns, apply_chat_template=apply_chat_template, tools=row_tools(row))
    if len(encoded) > 1:
        raise ValueError(
            "the chat template rewrites earlier turns, so that a continuation of several assistant turns is not "
            "one sequence: leave one assistant turn after the prompt"
        )
    return encoded[0]


def _refuse_answer(prompt: list[Message], key: str, setting: str = "data.messages_key") -> None:
    """Refuses a prompt whose assistant turn is over: what is learned or sampled would be a second one after it."""
    if prompt[-1]["role"] == "assistant":
        raise ValueError(
            f"the prompt must end with a user, tool or system turn, not with an assistant turn as column {key!r} does; "
            f"leave that turn out, or set {setting} to the column of the prompt alone"
        )


def _continuation(value: Any, prompt: list[Message], key: str) -> list[Message]:
    if isinstance(value, str):
        return [{"role": "assistant", "content": value}]
    if isinstance(value, Sequence) and not value:
        return []
    messages = as_messages(value, key=key)
    if messages[: len(prompt)] == prompt:
        messages = messages[len(prompt) :]
    if messages and messages[-1]["role"] != "assistant":
        raise ValueError(f"{key!r} must end with an assistant turn, not with {messages[-1]['role']}")
    return messages


def _is_empty(continuation: list[Message]) -> bool:
    turns = [message for message in continuation if message["role"] == "assistant"]
    return not any(message["content"].strip() or message.get("tool_calls") for message in turns)


def _without(row: Row, *keys: str | None) -> Row:
    return {key: value for key, value in row.items() if key not in keys}
