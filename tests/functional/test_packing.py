import random
import time

import pytest

from rl2lightning.functional.packing import karmarkar_karp, plan_micro_batches


def lengths_of(n, seed=0, most=500):
    rng = random.Random(seed)
    return [rng.randint(1, most) for _ in range(n)]


def test_karmarkar_karp_on_the_textbook_example():
    # differencing 8 7 6 5 4 in two parts: 8-7 = 1, 6-5 = 1, 4-1 = 3, 3-1 = 2, so the sums are 16 and 14
    bins = karmarkar_karp([8, 7, 6, 5, 4], 2)
    assert [sum([8, 7, 6, 5, 4][i] for i in members) for members in bins] == [16, 14]


def test_karmarkar_karp_partitions_and_levels():
    lengths = lengths_of(200)
    bins = karmarkar_karp(lengths, 7)
    sums = [sum(lengths[i] for i in members) for members in bins]
    assert sorted(i for members in bins for i in members) == list(range(200))
    assert max(sums) - min(sums) <= 5  # of about 7,000 each
    assert sums == sorted(sums, reverse=True)


def test_fewer_items_than_bins_leaves_bins_empty():
    assert sorted(karmarkar_karp([3, 5], 4), reverse=True) == [[1], [0], [], []]
    assert karmarkar_karp([], 2) == [[], []]
    with pytest.raises(ValueError, match="num_bins=0"):
        karmarkar_karp([1], 0)


@pytest.mark.parametrize("n", [0, 1, 5, 64, 300])
@pytest.mark.parametrize("multiple_of", [1, 2, 8])
def test_every_index_once_within_budget_and_a_multiple(n, multiple_of):
    lengths = lengths_of(n)
    plan = plan_micro_batches(lengths, max_tokens=1000, multiple_of=multiple_of)
    assert sorted(i for members in plan for i in members) == list(range(n))
    assert all(sum(lengths[i] for i in members) <= 1000 for members in plan)
    assert len(plan) % multiple_of == 0
    assert len(plan) >= multiple_of


def test_no_more_micro_batches_than_needed_when_they_fit():
    assert len(plan_micro_batches([10] * 100, max_tokens=100)) == 10
    assert len(plan_micro_batches([51] * 10, max_tokens=100)) == 10  # two never share one
    assert len(plan_micro_batches([34] * 10, max_tokens=100)) == 5  # at most two share one
    lengths = lengths_of(500)
    least = -(-sum(lengths) // 4096)
    assert len(plan_micro_batches(lengths, max_tokens=4096)) <= least + 1


def test_the_count_is_raised_by_multiples_until_everything_fits():
    lengths = [3, 3, 2, 2, 2]  # 12 tokens fit 2 x 6, but differencing finds 7 and 5
    assert [sum(lengths[i] for i in members) for members in karmarkar_karp(lengths, 2)] == [7, 5]
    assert len(plan_micro_batches(lengths, max_tokens=6)) == 3
    assert len(plan_micro_batches(lengths, max_tokens=6, multiple_of=2)) == 4


def test_the_plan_is_the_same_every_time():
    lengths = lengths_of(100) + [7] * 50
    plans = [plan_micro_batches(lengths, max_tokens=900, multiple_of=4) for _ in range(2)]
    assert plans[0] == plans[1]


def test_ranks_get_contiguous_chunks_of_even_work():
    lengths = lengths_of(400)
    plan = plan_micro_batches(lengths, max_tokens=2000, multiple_of=4)
    share = len(plan) // 4
    loads = [sum(lengths[i] for members in plan[r * share : (r + 1) * share] for i in members) for r in range(4)]
    assert max(loads) - min(loads) < 0.01 * max(loads)


def test_no_rank_idles_while_another_has_two():
    plan = plan_micro_batches([90] * 5, max_tokens=100, multiple_of=4)  # 5 sequences in 8 micro-batches on 4 ranks
    held = [len(plan[2 * rank]) + len(plan[2 * rank + 1]) for rank in range(4)]
    assert sorted(held) == [1, 1, 1, 2]


def test_pairs_stay_together():
    lengths = lengths_of(60)
    units = [[i, i + 30] for i in range(30)]
    plan = plan_micro_batches(lengths, max_tokens=1500, multiple_of=2, units=units)
    home = {i: number for number, members in enumerate(plan) for i in members}
    assert sorted(home) == list(range(60))
    assert all(home[a] == home[b] for a, b in units)
    assert all(sum(lengths[i] for i in members) <= 1500 for members in plan)


def test_units_must_cover_every_sequence_once():
    for units in ([[0]], [[0, 1], [1]], [[0], [2]]):
        with pytest.raises(ValueError, match="exactly once"):
            plan_micro_batches([1, 1], max_tokens=10, units=units)


def test_a_sequence_over_budget_is_named_with_the_budget_and_the_setting():
    with pytest.raises(ValueError, match=r"sequence 1 has 101 tokens.* 100 .*raise max_tokens_per_device"):
        plan_micro_batches([10, 101], max_tokens=100)
    with pytest.raises(ValueError, match=r"\[0, 1\].* 111 tokens.*raise budget"):
        plan_micro_batches([10, 101], max_tokens=100, units=[[0, 1]], setting="budget")


def test_senseless_settings_are_refused():
    with pytest.raises(ValueError, match="max_tokens_per_device"):
        plan_micro_batches([], max_tokens=0)
    with pytest.raises(ValueError, match="multiple_of=0"):
        plan_micro_batches([1], max_tokens=1, multiple_of=0)


def test_ten_thousand_sequences_take_seconds_at_most():
    start = time.perf_counter()
    plan_micro_batches(lengths_of(10_000, most=2048), max_tokens=16384, multiple_of=8)
    assert time.perf_counter() - start < 10
