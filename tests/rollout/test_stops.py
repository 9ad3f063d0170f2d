"""Where texts end a completion, on a tokenizer of single letters."""

from __future__ import annotations

import pytest

from rl2lightning.rollout.stops import stop_watch
from rl2lightning.types import SamplingParams


class Letters:
    """Each token is a letter by its code."""

    def decode(self, token_ids: list[int], *, clean_up_tokenization_spaces: bool) -> str:
        return "".join(map(chr, token_ids))


@pytest.mark.parametrize(
    ("text", "stop", "min_tokens", "num_tokens"),
    [
        ("xaby", ("ab",), 0, 3),
        ("xaby", ("q", "ab"), 3, 3),
        ("xaby", ("ab",), 4, None),  # too early, and not found again by the fourth
        ("abxxabx", ("ab",), 3, 6),  # but the second time
        ("xxaabb", ("aab",), 5, 5),  # begun too early, complete in time
    ],
)
def test_a_text_ends_a_completion_from_min_tokens_on(
    text: str, stop: tuple[str, ...], min_tokens: int, num_tokens: int | None
) -> None:
    sampling = SamplingParams(max_tokens=20, stop=stop, min_tokens=min_tokens)
    tokens = [ord(letter) for letter in text]
    for num_begun in range(num_tokens or len(tokens)):  # cut off there, and gone on with
        watch = stop_watch(sampling, Letters(), tokens[:num_begun])  # type: ignore[arg-type]
        assert watch is not None
        ends = [n for n, token in enumerate(tokens[num_begun:], num_begun + 1) if watch.push(token)]
        assert ends[:1] == ([] if num_tokens is None else [num_tokens])
