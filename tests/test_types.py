"""Sequences: slices of a flat batch; sampling settings."""

import pytest
import torch

from rl2lightning.types import SamplingParams, Sequences


def sequences(**optional) -> Sequences:
    """Sequences 5 6 | 7 8 9 with actions 6, 8 and 9."""
    return Sequences.from_lists([[5, 6], [7, 8, 9]], [[False, True], [False, True, True]], [3, 4], **optional)


def test_select_takes_sequences_in_the_order_asked_for_with_all_their_fields() -> None:
    seqs = sequences(rewards=[[0, 1], [0, 2, 3]], truncated=torch.tensor([True, False])).select([1, 0, 1])
    assert seqs.input_ids.tolist() == [7, 8, 9, 5, 6, 7, 8, 9]
    assert seqs.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert seqs.group_ids.tolist() == [4, 3, 4]
    assert seqs.rewards is not None
    assert seqs.rewards.tolist() == [0, 2, 3, 0, 1, 0, 2, 3]
    assert seqs.truncated is not None
    assert seqs.truncated.tolist() == [False, True, False]


def test_concat_undoes_select() -> None:
    seqs = sequences(rewards=[[0, 1], [0, 2, 3]])
    joined = Sequences.concat([seqs.select([0]), seqs.select([1])])
    assert joined.input_ids.tolist() == seqs.input_ids.tolist()
    assert joined.cu_seqlens.tolist() == seqs.cu_seqlens.tolist()


def test_concat_loses_no_field_silently() -> None:
    with pytest.raises(ValueError, match="some of the sequences have `margins` and others lack it"):
        Sequences.concat([sequences(margins=torch.ones(2)), sequences()])
    with pytest.raises(ValueError, match="different temperatures"):
        Sequences.concat([sequences(), sequences().replace(temperature=0.5)])


def test_positions_and_sums_stay_within_a_sequence() -> None:
    seqs = sequences()
    assert seqs.position_ids.tolist() == [0, 1, 0, 1, 2]
    assert seqs.sequence_ids.tolist() == [0, 0, 1, 1, 1]
    assert seqs.sum_per_sequence(torch.tensor([10.0, 1.0, 10.0, 2.0, 3.0])).tolist() == [1, 5]  # actions only


def test_a_dummy_has_the_same_fields_and_no_action() -> None:
    seqs = sequences(rewards=[[0, 1], [0, 2, 3]], truncated=torch.tensor([True, False]))
    dummy = Sequences.dummy(seqs)
    assert dummy.token_fields().keys() == seqs.token_fields().keys()
    assert dummy.sequence_fields().keys() == seqs.sequence_fields().keys()
    assert not dummy.action_mask.any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -3}, "top_k=-3"),
        ({"min_p": 2.0}, "min_p=2.0"),
        ({"min_tokens": 9, "max_tokens": 4}, "min_tokens=9"),
    ],
)
def test_sampling_settings_out_of_range_are_named(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**settings)


@pytest.mark.parametrize("settings", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"min_tokens": 1}])
def test_whatever_forbids_tokens_truncates_the_support(settings: dict) -> None:
    assert SamplingParams(**settings).truncates_support
    assert not SamplingParams(temperature=0.5).truncates_support
