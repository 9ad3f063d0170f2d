from __future__ import annotations

import pytest
import torch

from rl2lightning.rollout.weight_stream import ExpectedWeights, read_to_end


@pytest.fixture
def expected(model) -> ExpectedWeights:
    return ExpectedWeights.of(model.config)


def test_a_complete_stream_passes_as_it_is(expected, model):
    passed = dict(expected.checked(model.named_parameters()))
    assert passed.keys() == dict(model.named_parameters()).keys()
    assert all(passed[name].data_ptr() == p.data_ptr() for name, p in model.named_parameters())


def test_a_tied_weight_passes_once_and_under_its_own_name(expected, model):
    embedding = model.model.embed_tokens.weight
    rest = [(name, p) for name, p in model.named_parameters() if p is not embedding]
    for names in (["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        passed = [name for name, _ in expected.checked([*((name, embedding) for name in names), *rest])]
        assert passed == ["model.embed_tokens.weight", *(name for name, _ in rest)]


def test_two_values_of_one_tied_weight_are_refused(expected, model):
    stream = [*model.named_parameters(), ("lm_head.weight", torch.zeros_like(model.lm_head.weight))]
    with pytest.raises(ValueError, match="'lm_head.weight' is tied .* another value"):
        list(expected.checked(stream))


def test_a_weight_too_few_is_noticed_at_the_end(expected, model):
    passed = []
    with pytest.raises(ValueError, match=r"left out 1 weights, the first being 'model\.norm\.weight'"):
        passed.extend(expected.checked(list(model.named_parameters())[:-1]))
    assert len(passed) == len(list(model.named_parameters())) - 1  # those that came have passed by then


def test_building_the_expectation_draws_no_random_numbers(model):
    before = torch.get_rng_state()
    ExpectedWeights.of(model.config)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_error_is_raised_once_the_stream_has_passed():
    passed = []

    def stream():
        for i in range(4):
            passed.append(i)
            yield f"{i}", torch.zeros(())

    def load() -> None:
        with read_to_end(stream()) as weights:
            next(weights)
            raise ValueError("no room")

    with pytest.raises(ValueError, match="no room"):
        load()
    assert passed == [0, 1, 2, 3]
