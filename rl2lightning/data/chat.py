"""Messages to tokens: prompts, supervised targets with their masks, and what an environment adds between turns.

Text is rendered per prefix of the conversation and each part is tokenised by itself, so that the tokens before an
answer are those the model sees when it is asked, and no token straddles the border of what is trained.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl2lightning.types import Message, Row, refuse_misplaced

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TrainOn = Literal["assistant", "all", "last"]
Encoded = tuple[list[int], list[bool]]  # tokens of one sequence and which of them are trained
Segment = tuple[str, bool]  # text and whether it is trained

_ROLES = ("system", "developer", "user", "assistant", "tool")
_PLACEHOLDER = "[[the-assistant-said-this]]"  # stands for generated text when only what surrounds it is wanted
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model directory or a Hugging Face name."""
    from transformers import AutoTokenizer

    directory = Path(path).expanduser()
    if not directory.is_dir() and (path.startswith((".", "/", "~")) or path.count("/") > 1):
        raise ValueError(f"model {path!r} is not a directory; set model.init_args.model, or its tokenizer, to one")
    # without files a tokenizer without words may be built from the model's type alone
    if directory.is_dir() and not any((directory / name).is_file() for name in _TOKENIZER_FILES):
        refuse_misplaced(path)
        raise ValueError(
            f"no tokenizer in {path!r}: set model.init_args.tokenizer to a directory that has one of its files"
        )
    try:
        return AutoTokenizer.from_pretrained(str(directory) if directory.is_dir() else path)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and not directory.is_dir():
            raise ValueError(
                f"model or tokenizer {path!r} is no directory here and could not be had from the hub: "
                f"{str(error).splitlines()[0]}; set model.init_args.model, or its tokenizer, to a directory "
                "or a hub name"
            ) from error
        raise ValueError(f"cannot load a tokenizer from {path!r}: {error}; set model.init_args.tokenizer") from error


def row_tools(row: Row) -> list[Any] | None:
    """The row's tool descriptions, a list or (where a table mangles nested types) its JSON."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    if tools and not isinstance(tools, list):
        raise ValueError(f"'tools' must be a list of tool descriptions or its JSON, not {type(tools).__name__}")
    return tools or None


def as_messages(value: Any, *, key: str | None = None) -> list[Message]:
    """A checked copy of a message list; a plain string is one user turn. Null fields, Arrow's filling, are left out.

    Args:
        value: the list or the string.
        key: the column it is from, for errors.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, Sequence):
        subject = "messages" if key is None else repr(key)
        raise ValueError(f"{subject} must be a list of messages or a string, not {type(value).__name__}")
    of_key = "" if key is None else f" of {key!r}"
    if not value:
        raise ValueError(f"the list of messages{of_key} is empty")
    return [_checked(message, f"message {i}{of_key}") for i, message in enumerate(value)]


def _checked(message: Any, name: str) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f"{name} must be a dict with role and content, not {type(message).__name__}")
    message = {key: value for key, value in message.items() if value is not None}
    if message.get("role") not in _ROLES:
        raise ValueError(
            f"{name} has role {message.get('role')!r} (its keys: {', '.join(map(str, message))}); "
            f"roles are {', '.join(_ROLES)}"
        )
    if "content" not in message and message.get("tool_calls"):
        message["content"] = ""
    if not isinstance(message.get("content"), str):
        kind = type(message.get("content")).__name__
        raise ValueError(f"{name} ({message['role']}) needs a string as content, not {kind}")
    return message


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    tools: list[Any] | None = None,
    apply_chat_template: bool = True,
) -> list[int]:
    """Tokens of a conversation up to where the assistant's next turn begins.

    Without the chat template the contents are concatenated behind the tokenizer's beginning-of-sequence token, if it
    adds one by itself.
    """
    messages = as_messages(messages)
    if apply_chat_template:
        return _tokenize(tokenizer, _render(tokenizer, messages, tools=tools, generation_prompt=True))
    return _beginning(tokenizer) + _tokenize(tokenizer, "".join(message["content"] for message in messages))


def encode_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    train_on: TrainOn = "assistant",
    apply_chat_template: bool = True,
    tools: list[Any] | None = None,
) -> list[Encoded]:
    """Tokens and mask of a conversation that ends with an assistant turn.

    An assistant turn is trained up to and including its end-of-turn token, and nothing after it; what follows the last
    one is left out. Where the template rewrites earlier turns (drops their thinking) once a new one follows, the
    conversation is split: one sequence for each stretch of turns that continue one another.

    Args:
        train_on: `assistant` every assistant turn, `last` the final one only, `all` every token of every turn.
        apply_chat_template: False concatenates the contents and ends a trained final turn with the EOS token.
        tools: tool descriptions for the template.

    Returns:
        (token ids, mask) per sequence, mask True on trained tokens and never on the first.
    """
    messages = as_messages(messages)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"the conversation must end with an assistant turn, not with {messages[-1]['role']}")
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    encoded = encode_turns(
        tokenizer,
        messages,
        turns[-1:] if train_on == "last" else turns,
        apply_chat_template=apply_chat_template,
        tools=tools,
    )
    if train_on == "all":
        return [(ids, [i > 0 for i in range(len(ids))]) for ids, _ in encoded]
    return encoded


def encode_turns(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    turns: Sequence[int],
    *,
    apply_chat_template: bool = True,
    tools: list[Any] | None = None,
) -> list[Encoded]:
    """Like `encode_chat`, training the assistant turns at the positions `turns` (ascending)."""
    messages = as_messages(messages)
    if not apply_chat_template:
        return [_encode_plain(tokenizer, messages, turns)]
    sequences: list[list[Segment]] = []
    text = ""  # of the sequence that is being built
    for i in turns:
        prompt, turn = _prompt_and_turn(tokenizer, messages[: i + 1], tools)
        if sequences and prompt.startswith(text):
            sequences[-1] += [(prompt[len(text) :], False), (turn, True)]
        else:
            sequences.append([(prompt, False), (turn, True)])
        text = prompt + turn
    return [_encode_segments(tokenizer, segments) for segments in sequences]


def encode_reply(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    new_messages: Sequence[Message],
    *,
    stop_token_id: int | None,
    tools: list[Any] | None = None,
    apply_chat_template: bool = True,
) -> list[int]:
    """The tokens that an environment's new messages put behind a generated assistant turn.

    What the engine generated is never rendered nor tokenised again: the template runs on a placeholder, and only the
    text behind it is used, up to the prompt of the next assistant turn.

    Args:
        messages: the conversation up to and including the assistant turn that was generated.
        new_messages: what the environment says to it (roles user, tool, system).
        stop_token_id: the end-of-turn token the engine already produced, which is then not added again; None where
            the turn was cut off, which adds the template's own.
    """
    messages, new_messages = as_messages(messages), as_messages(new_messages)
    if messages[-1]["role"] != "assistant":
        raise ValueError(f"a reply follows an assistant turn, but the conversation ends with {messages[-1]['role']}")
    if not apply_chat_template:
        return _tokenize(tokenizer, "".join(message["content"] for message in new_messages))
    stand_in = {"role": "assistant", "content": _PLACEHOLDER}
    text = _render(tokenizer, [*messages[:-1], stand_in, *new_messages], tools=tools, generation_prompt=True)
    ids = _tokenize(tokenizer, _around_placeholder(text)[1])
    if stop_token_id is not None and stop_token_id in ids:
        end = ids.index(stop_token_id)
        # only as the end of the turn: further on it would be part of the new messages
        if not str(tokenizer.decode(ids[:end])).strip():
            return ids[end + 1 :]
    return ids


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, model_path: str, *, apply_chat_template: bool = True
) -> tuple[int, ...]:
    """Tokens that end a turn: the tokenizer's EOS, those of generation_config.json, the chat template's end of turn."""
    ids = {tokenizer.eos_token_id} if isinstance(tokenizer.eos_token_id, int) else set()
    ids.update(_generation_config_eos(model_path))
    if apply_chat_template and tokenizer.chat_template is not None:
        conversation = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PLACEHOLDER}]
        rendered = _render(tokenizer, conversation, tools=None, generation_prompt=False)
        special = _special_tokens(tokenizer)
        closing = [token for token in _tokenize(tokenizer, _around_placeholder(rendered)[1]) if token in special]
        ids.update(closing[:1])
    return tuple(sorted(ids))


def _generation_config_eos(model_path: str) -> list[int]:
    directory = Path(model_path).expanduser()
    if directory.is_dir():
        file = directory / "generation_config.json"
        eos = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    else:
        from transformers import GenerationConfig

        try:
            eos = GenerationConfig.from_pretrained(model_path).eos_token_id
        except OSError:  # the repository has no such file
            eos = None
    return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)


def _render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, tools: list[Any] | None, generation_prompt: bool
) -> str:
    from jinja2 import TemplateError

    if tokenizer.chat_template is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template: set apply_chat_template to false, "
            "or data.tokenizer to one that has"
        )
    try:
        text = tokenizer.apply_chat_template(
            list(messages),
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation_prompt,
        )
    except (TemplateError, TypeError) as error:
        roles = ", ".join(message["role"] for message in messages)
        raise ValueError(f"the chat template refuses a conversation of {roles or 'no messages'}: {error}") from error
    assert isinstance(text, str)
    return text


def _prompt_and_turn(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None
) -> tuple[str, str]:
    """The text before the last message, an assistant turn, and that turn through its end-of-turn token."""
    prompt = _render(tokenizer, messages[:-1], tools=tools, generation_prompt=True)
    full = _render(tokenizer, messages, tools=tools, generation_prompt=False)
    if not full.startswith(prompt):
        # the generation prompt says more than a finished turn repeats (it opens the thinking that the turn lacks)
        stand_in = [*messages[:-1], {"role": "assistant", "content": _PLACEHOLDER}]
        prompt = _around_placeholder(_render(tokenizer, stand_in, tools=tools, generation_prompt=False))[0]
        if not full.startswith(prompt):
            raise ValueError("the chat template rewrites the prompt of the very turn it renders: masks are undefined")
    turn = full[len(prompt) :]
    content = messages[-1]["content"].strip()
    start = turn.find(content) + len(content) if content in turn else 0
    ends = [
        turn.rfind(token, start) + len(token) for token in _special_tokens(tokenizer).values() if token in turn[start:]
    ]
    return prompt, turn[: max(ends, default=len(turn))]  # a template without end-of-turn token: all it adds is trained


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return special | dict(zip(tokenizer.all_special_ids, map(str, tokenizer.all_special_tokens), strict=True))


def _around_placeholder(text: str) -> tuple[str, str]:
    if text.count(_PLACEHOLDER) != 1:
        raise ValueError("the chat template does not render an assistant's content exactly once, word for word")
    before, _, after = text.partition(_PLACEHOLDER)
    return before, after


def _encode_plain(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], turns: Sequence[int]) -> Encoded:
    """Contents one after another, the tokenizer's beginning before them, EOS behind a trained final turn."""
    segments: list[Segment] = []
    for i, message in enumerate(messages):
        text, trained = message["content"], i in turns
        if segments and not trained and not segments[-1][1]:  # untrained text is tokenised in one piece, as in a prompt
            text = segments.pop()[0] + text
        segments.append((text, trained))
    ids, mask = _encode_segments(tokenizer, segments, _beginning(tokenizer))
    if not segments[-1][1]:
        return ids, mask
    if not isinstance(tokenizer.eos_token_id, int):
        raise ValueError(f"the tokenizer {tokenizer.name_or_path!r} has no EOS token to end a trained text with")
    return [*ids, tokenizer.eos_token_id], [*mask, True]


def _encode_segments(
    tokenizer: PreTrainedTokenizerBase, segments: Sequence[Segment], beginning: Sequence[int] = ()
) -> Encoded:
    ids, mask = list(beginning), [False] * len(beginning)
    for text, trained in segments:
        new = _tokenize(tokenizer, text)
        ids += new
        mask += [trained] * len(new)
    return ids, [trained and i > 0 for i, trained in enumerate(mask)]  # nothing predicts the first token


def _tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]) if text else []


def _beginning(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The beginning-of-sequence token, where the tokenizer adds one by itself."""
    added = list(tokenizer("")["input_ids"])
    return added[:1] if added and added[0] == tokenizer.bos_token_id and tokenizer.bos_token_id is not None else []
