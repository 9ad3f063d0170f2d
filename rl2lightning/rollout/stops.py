"""Texts that end a completion, for any engine: found in the tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl2lightning.types import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MORE = 8  # tokens looked at beyond one a character, for those that are no text or half a character


class StopWatch:
    """Reads along with one completion and says when its text holds one of `sampling.stop`.

    Example: stop `"</a>"`, tokens `"x<"`, `"/a"`, `">."`: the third ends the completion, which keeps all of it.
    """

    def __init__(self, sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer, self.stop, self.min_tokens = tokenizer, sampling.stop, sampling.min_tokens
        self.found: str | None = None
        self._tail: list[int] = []
        self._length = max(map(len, sampling.stop)) + _MORE
        self._count = 0

    def skip(self, token_ids: Sequence[int]) -> None:
        """Takes tokens that have not ended the completion."""
        self._count += len(token_ids)
        self._tail = [*self._tail, *token_ids][-self._length :]

    def push(self, token_id: int) -> bool:
        """Takes the next token; whether it ends the completion."""
        self.skip([token_id])
        text = str(self.tokenizer.decode(self._tail, clean_up_tokenization_spaces=False))
        self.found = next((stop for stop in self.stop if stop in text), None)
        if self.found is not None and self._count < self.min_tokens:  # too early, and not to be found again later
            self.found = None
            self._tail.clear()
        return self.found is not None


def stop_watch(
    sampling: SamplingParams, tokenizer: PreTrainedTokenizerBase | None, begun: Sequence[int] = ()
) -> StopWatch | None:
    """A watch where the sampling asks for one, on a completion that begins with the tokens `begun`.

    Raises:
        ValueError: there are texts to stop at and no tokenizer to read with.
    """
    if not sampling.stop:
        return None
    if tokenizer is None:
        raise ValueError(f"sampling.stop={list(sampling.stop)} needs an engine that was started with a tokenizer")
    watch = StopWatch(sampling, tokenizer)
    for token_id in begun[: sampling.min_tokens]:
        watch.push(token_id)
    watch.skip(begun[sampling.min_tokens :])
    return watch
