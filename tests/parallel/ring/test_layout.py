"""The zigzag layout, by hand and by what must hold of it."""

import random

import pytest
import torch

from rl2lightning.parallel.ring.layout import zigzag


def test_two_ranks_by_hand() -> None:
    # 7 tokens in four chunks of 2, the last one half empty; 3 tokens whole; 1 token whole
    layout = zigzag([3, 7, 1], 2, split_from=4)
    assert layout.cut == (1,)
    assert layout.chunks == (2,)
    assert layout.whole == ((0,), (2,))
    tokens, positions = layout.rows(0)
    assert tokens.tolist() == [3, 4, 9, -1, 0, 1, 2]  # chunks 0 and 3 of the second sequence, then the first
    assert positions.tolist() == [0, 1, 6, 7, 0, 1, 2]
    tokens, positions = layout.rows(1)
    assert tokens.tolist() == [5, 6, 7, 8, 10]  # chunks 1 and 2, then the third
    assert positions.tolist() == [2, 3, 4, 5, 0]


def test_rows_are_padded_to_a_multiple_and_never_none() -> None:
    layout = zigzag([5, 2], 4, split_from=100, row_multiple=4)
    assert layout.whole == ((0,), (1,), (), ())
    tokens = [layout.rows(rank)[0].tolist() for rank in range(4)]
    assert tokens == [[0, 1, 2, 3, 4, -1, -1, -1], [5, 6, -1, -1], [-1] * 4, [-1] * 4]
    assert zigzag([5], 2, split_from=100).rows(1)[0].tolist() == [-1]


@pytest.mark.parametrize("seed", range(20))
def test_every_token_has_one_row(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(0, 50) for _ in range(draw.randint(1, 12))]
    size, split_from = draw.choice([1, 2, 3, 4, 8]), draw.choice([None, 0, 10, 30, 1000])
    layout = zigzag(lengths, size, split_from=split_from, row_multiple=draw.choice([1, 2, 6]))
    starts = torch.tensor([0, *lengths]).cumsum(0)
    seen = []
    for rank in range(size):
        tokens, positions = layout.rows(rank)
        assert len(tokens) % layout.row_multiple == 0
        real = tokens >= 0
        owner = torch.searchsorted(starts, tokens[real], right=True) - 1
        assert positions[real].tolist() == (tokens[real] - starts[owner]).tolist()
        seen += tokens[real].tolist()
    assert sorted(seen) == list(range(sum(lengths)))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_a_cut_sequence_is_the_same_work_everywhere(size: int) -> None:
    layout = zigzag([1024], size, split_from=0)
    pairs = [int((layout.rows(rank)[1] + 1).sum()) for rank in range(size)]  # of a token and one it sees
    assert len(set(pairs)) == 1


@pytest.mark.parametrize(
    ("lengths", "size", "cut"),
    [
        ([49152] + [2048] * 8, 8, 1),  # the long one; the others are one for each rank
        ([32768, 2048], 8, 2),  # whole, the short one would make one rank half as busy again as the others
        ([4000] * 16, 4, 0),  # even as they are
        ([700, 600, 500, 10], 4, 0),  # too short for chunks that fill a kernel's tile
        ([131072], 4, 1),
    ],
)
def test_as_few_sequences_are_cut_as_an_even_load_allows(lengths: list[int], size: int, cut: int) -> None:
    layout = zigzag(lengths, size)
    assert len(layout.cut) == cut
    assert set(layout.cut) == set(range(cut))  # the longest, which come first here


def test_no_rank_holds_far_more_tokens_than_the_mean_although_the_work_is_even() -> None:
    # a sequence this long is as much work as 192 short ones, which are three times as many tokens
    layout = zigzag([131072] * 3 + [2048] * 192, 4)
    rows = [len(layout.rows(rank)[0]) for rank in range(4)]
    assert max(rows) <= 1.1 * sum(rows) / 4


def test_layouts_of_equal_lengths_are_equal() -> None:
    """Every rank works the layout out for itself."""
    lengths = [900, 17, 900, 900, 5000, 17]
    assert zigzag(lengths, 4) == zigzag(list(lengths), 4)
