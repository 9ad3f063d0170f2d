from itertools import islice

import pytest
import torch

from rl2lightning.data.loader import GlobalBatches, Position, PromptLoader, RowOrder, StepLoader, share
from rl2lightning.data.sources import Rows, Source, Split


class Positions:
    """An encoder that hands the rows through."""

    def __call__(self, rows):
        return [row["x"] for _, row, _ in rows]


def make_split(num_rows):
    return Split(Rows([[{"x": i} for i in range(num_rows)]], [Source("rows")]), list(range(num_rows)))


def make_loader(num_rows=10, batch_size=4, *, rank=0, size=1, step=0, seed=0, drop_last=True, num_workers=0):
    split = make_split(num_rows)
    order = RowOrder(split, seed)
    batches = GlobalBatches(split, batch_size, Positions(), rank, size, order=order, drop_last=drop_last)
    return StepLoader(batches, position=Position(step=step), num_workers=num_workers)


def epochs(loader, num_epochs):
    return [batch for _ in range(num_epochs) for batch in loader]


def test_shares_are_contiguous_cover_everything_once_and_differ_by_at_most_one():
    assert [list(share(range(5), r, 2)) for r in range(2)] == [[0, 1], [2, 3, 4]]
    assert [list(share([7], r, 3)) for r in range(3)] == [[], [], [7]]
    for n in range(9):
        for size in range(1, 5):
            shares = [share(range(n), r, size) for r in range(size)]
            assert [i for s in shares for i in s] == list(range(n))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_ranks_shares_in_order_are_the_global_batch_on_any_layout():
    whole = epochs(make_loader(), 2)
    for size in (2, 3, 5):  # 5 ranks share batches of 4: some get nothing
        ranks = [epochs(make_loader(rank=r, size=size), 2) for r in range(size)]
        assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == whole


def test_each_pass_is_shuffled_anew_and_sees_each_row_once():
    loader = make_loader(num_rows=8)
    assert len(loader) == 2
    first, second = sum(epochs(loader, 1), []), sum(epochs(loader, 1), [])
    assert sorted(first) == sorted(second) == list(range(8))
    assert first != second
    assert first != sum(epochs(make_loader(num_rows=8, seed=1), 1), [])


def test_the_incomplete_last_batch_is_dropped_or_kept():
    assert [len(batch) for batch in make_loader(10)] == [4, 4]
    loader = make_loader(10, drop_last=False)
    assert len(loader) == 3
    assert [len(batch) for batch in loader] == [4, 4, 2]
    with pytest.raises(ValueError, match="batch_size=4 is larger than the 3 rows"):
        make_loader(3)


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])  # inside an epoch, at its end, in later ones
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_loader_goes_on_where_the_counter_stands(step, num_workers):
    uninterrupted = epochs(make_loader(), 3)
    resumed = make_loader(step=step, num_workers=num_workers)
    assert list(islice(resumed, 6 - step)) == uninterrupted[step:6][: len(resumed)]


def test_the_counter_is_read_at_the_first_batch_and_counts_what_was_handed_out():
    loader = make_loader()
    iterator = iter(loader)
    loader.position.step = 1  # restored after the iterator was made
    assert next(iterator) == epochs(make_loader(), 1)[1]
    assert loader.position.step == 2


def test_epochs_cut_short_go_on_with_the_rows_they_did_not_reach():
    loader = make_loader(num_rows=12)
    assert len(loader) == 3
    pieces = [list(islice(loader, 2)) for _ in range(3)]
    assert sum(pieces, []) == epochs(make_loader(num_rows=12), 2)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterating_leaves_the_global_random_state_alone(num_workers):
    before = torch.get_rng_state()
    list(make_loader(num_workers=num_workers))
    assert torch.equal(torch.get_rng_state(), before)


def test_without_a_position_every_iteration_is_the_whole_set_in_order():
    loader = StepLoader(GlobalBatches(make_split(5), 2, Positions(), rank=0, size=1))
    assert epochs(loader, 2) == [[0, 1], [2, 3], [4]] * 2


def make_prompt_loader(position, *, rank=0, size=1, steps_per_rollout=2):
    def draw(n):
        start, position.prompt = position.prompt, position.prompt + n
        return [{"x": p} for p in range(start, start + n)], list(range(start, start + n))

    return PromptLoader(
        draw,
        position,
        num_steps=4,
        prompts_per_rollout=3,
        steps_per_rollout=steps_per_rollout,
        rank=rank,
        size=size,
    )


def test_prompts_come_with_the_first_step_of_each_rollout():
    batches = list(make_prompt_loader(Position()))
    assert [(b.step_of_rollout, b.indices) for b in batches] == [(0, [0, 1, 2]), (1, []), (0, [3, 4, 5]), (1, [])]
    assert [b.first_of_rollout for b in batches] == [True, False, True, False]
    assert batches[2].rows == [{"x": 3}, {"x": 4}, {"x": 5}]


def test_a_rollout_is_shared_between_ranks_and_resumes_in_its_middle():
    shares = [[b.indices for b in make_prompt_loader(Position(), rank=r, size=2)] for r in range(2)]
    assert shares == [[[0], [], [3], []], [[1, 2], [], [4, 5], []]]
    resumed = make_prompt_loader(Position(step=1, prompt=5))  # two more than the first rollout: refills
    assert [(b.step_of_rollout, b.indices) for b in islice(resumed, 3)] == [(1, []), (0, [5, 6, 7]), (1, [])]
