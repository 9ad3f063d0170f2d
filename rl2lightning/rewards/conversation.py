"""The tokens of a conversation, as a reward model has learned to read them."""

from __future__ import annotations

import threading
from typing import Any

from rl2lightning.data.chat import encode_turns, load_tokenizer, row_tools
from rl2lightning.types import Trajectory


class ConversationTokens:
    """Renders the messages of a trajectory by a reward model's own chat template. Called from several threads.

    By default a conversation ends as in the training of `rl2lightning.RM`, with the end-of-turn token of the last
    assistant turn, at which the reward is read. Many a template goes on, with a line break for instance, and models
    trained on the template's whole text read their reward there.

    Args:
        tokenizer: directory or hub name.
        apply_chat_template: False concatenates the contents and ends with the EOS token, as for base models.
        whole_template: go on to the end of what the template writes.
    """

    def __init__(self, tokenizer: str, *, apply_chat_template: bool = True, whole_template: bool = False) -> None:
        if whole_template and not apply_chat_template:
            raise ValueError("whole_template needs a template: set apply_chat_template to true, or leave it out")
        self._tokenizer: Any = load_tokenizer(tokenizer)
        self._apply_chat_template, self._whole_template = apply_chat_template, whole_template
        self._lock = threading.Lock()  # fast tokenizers raise where two threads set them up at a time

    def __call__(self, trajectory: Trajectory) -> list[int]:
        turns = [i for i, message in enumerate(trajectory.messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("the conversation has no assistant turn that could be scored")
        messages, tools = trajectory.messages[: turns[-1] + 1], row_tools(trajectory.row)
        with self._lock:
            if self._whole_template:
                text = self._tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
                return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            encoded = encode_turns(
                self._tokenizer,
                messages,
                turns[-1:],
                apply_chat_template=self._apply_chat_template,
                tools=tools,
            )
        return encoded[0][0]
