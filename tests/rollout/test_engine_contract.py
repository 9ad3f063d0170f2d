"""What every engine must do. Each engine is one entry of ENGINES in conftest.py."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rl2lightning.rollout.engine import RolloutEngine, derive_seed
from rl2lightning.types import SamplingParams, StructuredOutput

EOS = 2


@pytest.fixture
def loaded(engine: RolloutEngine, model) -> RolloutEngine:
    engine.update_weights(model.named_parameters(), version=3)
    return engine


def prompts(n: int) -> list[list[int]]:
    """Of lengths 1 to 12, ids 3 to 97."""
    return [[3 + derive_seed("prompt", i, j) % 95 for j in range(1 + i * 5 % 12)] for i in range(n)]


def run(engine: RolloutEngine) -> dict:
    done = {}
    while engine.unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


# -- what is generated --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logps_are_those_of_a_plain_forward_at_the_sampling_temperature(loaded, model, processed, temperature):
    completions = loaded.generate(prompts(9), SamplingParams(max_tokens=12, temperature=temperature), range(9))
    for prompt, completion in zip(prompts(9), completions, strict=True):
        assert completion.prompt_ids == prompt
        expected = processed(model, prompt, completion.token_ids, temperature=temperature)
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("settings", "warper"),
    [
        ({"top_p": 0.6}, TopPLogitsWarper(0.6)),
        ({"top_k": 4}, TopKLogitsWarper(4)),
        ({"min_p": 0.2}, MinPLogitsWarper(0.2)),
    ],
)
def test_logps_of_truncated_sampling_are_renormalised(loaded, model, processed, settings, warper):
    sampling = SamplingParams(max_tokens=12, temperature=1.2, **settings)
    for completion in loaded.generate(prompts(6), sampling, range(6)):
        arguments = (model, completion.prompt_ids, completion.token_ids)
        expected = processed(*arguments, temperature=1.2, warpers=[warper])
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=1e-5, rtol=0)
        assert not torch.allclose(expected, processed(*arguments, temperature=1.2), atol=1e-3)


def test_greedy_takes_the_likeliest_token_and_its_untruncated_logp(loaded, model, processed):
    sampling = SamplingParams(max_tokens=10, temperature=0.0, top_k=1)
    for prompt, completion in zip(prompts(6), loaded.generate(prompts(6), sampling, range(6)), strict=True):
        ids = list(prompt)
        for token in completion.token_ids:
            with torch.no_grad():
                assert token == model(input_ids=torch.tensor([ids])).logits[0, -1].argmax().item()
            ids.append(token)
        expected = processed(model, prompt, completion.token_ids)
        torch.testing.assert_close(torch.tensor(completion.logps), expected, atol=1e-5, rtol=0)


def test_tokens_are_drawn_as_often_as_they_are_likely(loaded, model):
    prompt, n = [10, 20, 30], 3000
    sampling = SamplingParams(max_tokens=1, temperature=0.5)
    drawn = [c.token_ids[0] for c in loaded.generate([prompt] * n, sampling, range(n))]
    with torch.no_grad():
        probs = model(input_ids=torch.tensor([prompt])).logits[0, -1].div(0.5).softmax(-1)
    counts = torch.bincount(torch.tensor(drawn), minlength=128)
    deviations = (counts - n * probs) / (n * probs * (1 - probs)).sqrt().clamp(min=1)
    assert deviations.abs().max() < 4.5
    assert counts.max() > 100  # some token is likely enough for this to mean something


def test_a_completion_depends_on_its_own_seed_and_not_on_its_company(loaded):
    sampling = SamplingParams(max_tokens=10)
    together = loaded.generate(prompts(10), sampling, range(10))
    alone = [loaded.generate([prompt], sampling, [seed])[0] for seed, prompt in enumerate(prompts(10))]
    backwards = loaded.generate(prompts(10)[::-1], sampling, range(9, -1, -1))[::-1]
    for other in (alone, backwards):
        assert [c.token_ids for c in together] == [c.token_ids for c in other]
        for a, b in zip(together, other, strict=True):
            torch.testing.assert_close(torch.tensor(a.logps), torch.tensor(b.logps), atol=1e-5, rtol=0)


def test_samples_of_one_prompt_differ_by_seed_and_repeat_with_it(loaded):
    sampling = SamplingParams(max_tokens=10)
    samples = [c.token_ids for c in loaded.generate([[5, 6, 7]] * 8, sampling, range(8))]
    assert len({tuple(ids) for ids in samples}) == 8
    assert samples == [c.token_ids for c in loaded.generate([[5, 6, 7]] * 8, sampling, range(8))]


def test_requests_with_different_sampling_share_a_batch(loaded):
    settings = [
        SamplingParams(max_tokens=6),
        SamplingParams(max_tokens=9, temperature=0.0, top_p=0.01, top_k=1, min_p=0.9),
        SamplingParams(max_tokens=4, top_p=0.3),
        SamplingParams(max_tokens=7, min_tokens=5, stop_token_ids=tuple(range(3, 60))),
    ]
    for i, sampling in enumerate(settings):
        loaded.submit(f"{i}", [9, 8, 7], sampling, seed=i)
    together = run(loaded)
    for i, sampling in enumerate(settings):
        (alone,) = loaded.generate([[9, 8, 7]], sampling, [i])
        assert together[f"{i}"].token_ids == alone.token_ids
        torch.testing.assert_close(torch.tensor(together[f"{i}"].logps), torch.tensor(alone.logps), atol=1e-5, rtol=0)


def test_the_global_generators_are_left_alone(engine, model):
    before = torch.get_rng_state()
    engine.update_weights(model.named_parameters(), version=0)
    engine.generate([[5, 6]], SamplingParams(max_tokens=3), [1])
    assert torch.equal(torch.get_rng_state(), before)


# -- where it ends ------------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_completion_and_belongs_to_it(loaded):
    (free,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=12), [0])
    stop = free.token_ids[5]
    assert stop not in free.token_ids[:5]
    (stopped,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=12, stop_token_ids=(stop,)), [0])
    assert stopped.token_ids == free.token_ids[:6]
    assert (stopped.finish_reason, stopped.truncated) == ("stop", False)
    assert (free.finish_reason, free.truncated, len(free.token_ids)) == ("length", True, 12)


def test_the_models_own_stop_tokens_hold_without_being_named(loaded):
    completions = loaded.generate([[4, 5]] * 150, SamplingParams(max_tokens=12), range(150))
    stopped = [c for c in completions if EOS in c.token_ids]
    assert len(stopped) > 2
    assert all(c.token_ids.index(EOS) == len(c.token_ids) - 1 and c.finish_reason == "stop" for c in stopped)
    assert all(c.finish_reason == "length" for c in completions if c not in stopped)


def test_a_stop_token_as_the_last_token_allowed_is_a_stop(loaded):
    (free,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])
    sampling = SamplingParams(max_tokens=6, stop_token_ids=(free.token_ids[5],))
    (stopped,) = loaded.generate([[4, 5]], sampling, [0])
    assert (len(stopped.token_ids), stopped.finish_reason) == (6, "stop")


def test_stop_tokens_are_not_in_the_distribution_before_min_tokens(loaded, model):
    stops = tuple(range(3, 100))
    (completion,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=9, min_tokens=4, stop_token_ids=stops), [0])
    assert not set(completion.token_ids[:4]) & {*stops, EOS}
    ids = [4, 5]
    for i, token in enumerate(completion.token_ids):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        if i < 4:
            logits[[*stops, EOS]] = -torch.inf
        assert completion.logps[i] == pytest.approx(logits.log_softmax(-1)[token].item(), abs=1e-5)
        ids.append(token)
    assert len(completion.token_ids) >= 5
    assert completion.finish_reason == "stop"


def test_prompt_and_completion_stay_within_max_model_len(loaded):
    (completion,) = loaded.generate([[5] * 60], SamplingParams(max_tokens=50), [0])
    assert (len(completion.token_ids), completion.finish_reason) == (4, "length")


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_prompt_without_room_gives_an_empty_completion_and_no_error(loaded, length):
    crowded, normal = loaded.generate([[5] * length, [5]], SamplingParams(max_tokens=3), [0, 1])
    assert (crowded.token_ids, crowded.logps, crowded.finish_reason) == ([], [], "length")
    assert len(normal.token_ids) == 3


def test_a_stop_text_ends_the_completion_with_the_token_that_completes_it(loaded, tokenizer):
    (free,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=12), [0])
    text = tokenizer.decode(free.token_ids)
    words = [tokenizer.decode(free.token_ids[i : i + 2]) for i in range(11)]
    at = next(i for i in range(2, 11) if len(words[i]) == 2 and text.count(words[i]) == 1)
    for stop in ((words[at],), ("@@@", words[at])):
        sampling = SamplingParams(max_tokens=12, stop=stop)
        stopped, unstopped = loaded.generate([[4, 5], [4, 5]], sampling, [0, 1])
        assert stopped.token_ids == free.token_ids[: at + 2]
        assert stopped.logps == pytest.approx(free.logps[: at + 2], abs=1e-5)
        assert (stopped.finish_reason, stopped.stop, stopped.truncated) == ("stop", words[at], False)
        assert words[at] in tokenizer.decode(unstopped.token_ids) or unstopped.finish_reason == "length"
    (late,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=12, stop=(words[at],), min_tokens=at + 3), [0])
    assert len(late.token_ids) > at + 2
    assert late.stop is None or tokenizer.decode(late.token_ids).endswith(words[at])  # not by one that came too early


def test_stop_texts_need_a_tokenizer(loaded, monkeypatch):
    monkeypatch.setattr(loaded, "running_on", replace(loaded.running_on, tokenizer=None))
    with pytest.raises(ValueError, match="tokenizer"):
        loaded.submit("a", [4], SamplingParams(stop=("x",)), seed=0)
    assert loaded.unfinished == 0


# -- structured forms ---------------------------------------------------------------------------------------------

OBJECT = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
FORMS = [
    (StructuredOutput(regex="[0-9]{3}x"), lambda text: re.fullmatch("[0-9]{3}x", text)),
    (StructuredOutput(choice=("yes", "no", "nobody")), lambda text: text in ("yes", "no", "nobody")),
    (StructuredOutput(json_schema=OBJECT), lambda text: isinstance(json.loads(text)["a"], bool)),
]


def test_a_structured_form_is_refused_or_kept_to_with_the_logps_of_the_tokens_that_fit(
    loaded, model, processed, tokenizer
):
    for form, fits in FORMS:
        sampling = SamplingParams(max_tokens=50, temperature=1.3, structured=form)
        if not loaded.running_on.structured:
            with pytest.raises(ValueError, match=r"sampling\.structured needs an engine that follows grammars"):
                loaded.submit("a", [4], sampling, seed=0)
            continue
        ended = [c for c in loaded.generate(prompts(12), sampling, range(12)) if not c.truncated]
        assert ended, [
            (c.token_ids, c.logps) for c in loaded.generate(prompts(2), sampling, range(2))
        ]  # blanks without end fit an object, too
        for completion in ended:
            assert completion.token_ids[-1] == EOS
            assert fits(tokenizer.decode(completion.token_ids[:-1]))
    assert loaded.unfinished == 0
    if loaded.running_on.structured:
        check_logps_of_digits(loaded, model, processed, tokenizer)


def check_logps_of_digits(engine, model, processed, tokenizer) -> None:
    digits = tokenizer.encode("0123456789")

    def digits_only(_, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.zeros(scores.shape[-1], dtype=torch.bool)
        allowed[digits] = True
        return scores.masked_fill(~allowed, -torch.inf)

    sampling = SamplingParams(max_tokens=9, temperature=0.7, structured=StructuredOutput(regex="[0-9]{3}x"))
    for c in engine.generate(prompts(6), sampling, range(6)):
        expected = processed(model, c.prompt_ids, c.token_ids[:3], temperature=0.7, warpers=[digits_only])
        torch.testing.assert_close(torch.tensor(c.logps[:3]), expected, atol=1e-5, rtol=0)
        assert c.logps[3:] == [0.0, 0.0]  # the x, and the end


def test_a_form_cannot_be_gone_on_with(loaded):
    with pytest.raises(ValueError, match=r"structured"):
        loaded.submit("a", [4, 5], SamplingParams(structured=StructuredOutput(regex="a+")), seed=0, begun=1)
    assert loaded.unfinished == 0


# -- requests -----------------------------------------------------------------------------------------------------


def test_an_aborted_request_resumes_with_its_tokens_as_prompt(loaded, model, processed):
    sampling = SamplingParams(max_tokens=12)
    (whole,) = loaded.generate([[4, 5, 6]], sampling, [7])
    loaded.submit("x", [4, 5, 6], sampling, seed=7)
    loaded.submit("other", [9], sampling, seed=8)
    for _ in range(5):
        assert loaded.step() == []
    (partial,) = loaded.abort(["x"])
    assert (partial.finish_reason, partial.truncated) == ("abort", True)
    done = len(partial.token_ids)
    assert 5 <= done < 12
    assert partial.token_ids == whole.token_ids[:done]
    loaded.submit("y", [4, 5, 6, *partial.token_ids], sampling, seed=7, begun=done)
    rest = run(loaded)["y"]
    joined = partial.token_ids + rest.token_ids
    assert (len(joined), rest.finish_reason) == (12, "length")
    expected = processed(model, [4, 5, 6], joined)
    torch.testing.assert_close(torch.tensor(partial.logps + rest.logps), expected, atol=1e-5, rtol=0)
    if loaded.draws_by_position:  # as if nothing had happened
        assert joined == whole.token_ids


def test_what_was_begun_counts_for_the_least_and_the_most_tokens_and_its_text_is_read_on(loaded, tokenizer):
    a, b, c, d = tokenizer.encode("abcd")
    others = tuple(i for i in range(128) if i != d)
    go_on = {"seed": 0, "begun": 3}
    sampling = SamplingParams(max_tokens=20, stop=("cd",), min_tokens=4, stop_token_ids=others)
    loaded.submit("text", [9, a, b, c], sampling, **go_on)  # its 4th token can only be a "d"
    done = run(loaded)
    assert (done["text"].token_ids, done["text"].stop, done["text"].logps) == ([d], "cd", [0.0])
    loaded.submit("most", [9, a, b, c], SamplingParams(max_tokens=5), **go_on)
    loaded.submit("full", [9, a, b, c], SamplingParams(max_tokens=3), **go_on)
    loaded.submit(
        "least", [9, a, b, c], SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=others + (d,)), **go_on
    )
    done = run(loaded)
    assert [len(done[name].token_ids) for name in ("most", "full", "least")] == [2, 0, 1]
    assert [done[name].finish_reason for name in ("most", "full", "least")] == ["length", "length", "stop"]


def test_abort_reaches_running_waiting_and_rejected_requests_and_passes_over_the_rest(loaded):
    for i in range(8):  # more than fit at a time
        loaded.submit(f"{i}", [4 + i], SamplingParams(max_tokens=20), seed=i)
    loaded.step()
    loaded.submit("full", [4] * 64, SamplingParams(max_tokens=5), seed=0)
    aborted = {c.request_id: c for c in loaded.abort([*map(str, range(8)), "full", "nobody"])}
    assert set(aborted) == {*map(str, range(8)), "full"}
    assert sum(len(c.token_ids) > 0 for c in aborted.values()) == 4
    assert loaded.unfinished == 0
    assert loaded.step() == []
    assert loaded.abort(["0"]) == []


def test_unfinished_counts_what_was_not_handed_back(loaded):
    assert loaded.unfinished == 0
    loaded.submit("a", [4], SamplingParams(max_tokens=1), seed=0)
    loaded.submit("b", [4], SamplingParams(max_tokens=20), seed=0)
    assert loaded.unfinished == 2
    done = []
    while not done:
        done = loaded.step()
    assert [c.request_id for c in done] == ["a"]
    assert loaded.unfinished == 1
    loaded.abort(["b"])
    assert loaded.unfinished == 0


def test_an_id_in_use_and_an_empty_prompt_are_refused(loaded):
    loaded.submit("a", [4], SamplingParams(max_tokens=2), seed=0)
    with pytest.raises(ValueError, match="'a' is running"):
        loaded.submit("a", [4], SamplingParams(max_tokens=2), seed=0)
    with pytest.raises(ValueError, match="empty prompt"):
        loaded.submit("b", [], SamplingParams(max_tokens=2), seed=0)
    assert loaded.unfinished == 1
    run(loaded)
    loaded.submit("a", [4], SamplingParams(max_tokens=2), seed=0)  # free again
    run(loaded)


def test_generate_leaves_nothing_running_behind_an_error(loaded):
    with pytest.raises(ValueError, match="empty prompt"):
        loaded.generate([[4], []], SamplingParams(max_tokens=2), [0, 1])
    assert loaded.unfinished == 0
    with pytest.raises(ValueError, match="1 prompts and 2 seeds"):
        loaded.generate([[4]], SamplingParams(max_tokens=2), [0, 1])


# -- weights and sleep --------------------------------------------------------------------------------------------


def test_an_engine_without_a_complete_push_refuses_to_generate(engine):
    assert engine.version is None
    with pytest.raises(RuntimeError, match="update_weights"):
        engine.submit("a", [4], SamplingParams(), seed=0)
    assert engine.unfinished == 0


def test_a_push_changes_what_is_generated_and_is_named_in_it(loaded, model, processed):
    (first,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=8), [0])
    other = deepcopy(model)
    for p in other.parameters():
        p.mul_(0.7)
    loaded.update_weights(other.named_parameters(), version=11)
    (second,) = loaded.generate([[4, 5]], SamplingParams(max_tokens=8), [0])
    assert (first.weight_version, second.weight_version, loaded.version) == (3, 11, 11)
    expected = processed(other, [4, 5], second.token_ids)
    torch.testing.assert_close(torch.tensor(second.logps), expected, atol=1e-5, rtol=0)
    assert first.token_ids != second.token_ids


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda weights: weights[:-1], "left out 1 weights, the first being 'model.norm.weight'"),
        (lambda weights: [*weights, ("model.extra", torch.zeros(1))], "'model.extra'"),
        (lambda weights: [(weights[0][0], torch.zeros(2, 2)), *weights[1:]], "shape"),
    ],
    ids=["missing", "unknown", "shape"],
)
def test_a_broken_push_leaves_the_engine_dirty_until_a_complete_one(loaded, model, spoil, message):
    weights = list(model.named_parameters())
    stream = iter(spoil(weights))
    with pytest.raises(ValueError, match=message):
        loaded.update_weights(stream, version=4)
    assert next(stream, None) is None  # other processes gather what comes after the error
    assert loaded.version is None
    with pytest.raises(RuntimeError, match="update_weights"):
        loaded.generate([[4]], SamplingParams(max_tokens=2), [0])
    loaded.update_weights(weights, version=5)
    assert loaded.version == 5
    assert len(loaded.generate([[4]], SamplingParams(max_tokens=2), [0])[0].token_ids) == 2


def test_a_stream_that_raises_leaves_the_engine_dirty(loaded, model):
    def stream():
        yield from list(model.named_parameters())[:2]
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        loaded.update_weights(stream(), version=4)
    assert loaded.version is None


def test_tied_weights_may_come_under_either_name_or_both(loaded, model):
    expected = loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])[0].token_ids
    embedding = model.model.embed_tokens.weight
    rest = [(name, p) for name, p in model.named_parameters() if p is not embedding]
    for names in (["model.embed_tokens.weight"], ["lm_head.weight"], ["lm_head.weight", "model.embed_tokens.weight"]):
        zeros = [(name, torch.zeros_like(p)) for name, p in model.named_parameters()]
        loaded.update_weights(zeros, version=0)
        loaded.update_weights([*((name, embedding) for name in names), *rest], version=1)
        assert loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])[0].token_ids == expected


def test_weights_are_copied_not_kept(loaded, model):
    source = deepcopy(model)
    loaded.update_weights(source.named_parameters(), version=0)
    expected = loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])[0].token_ids
    for p in source.parameters():
        p.zero_()
    assert loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])[0].token_ids == expected


def test_neither_a_push_nor_sleep_goes_over_running_requests(loaded, model):
    loaded.submit("a", [4], SamplingParams(max_tokens=5), seed=0)
    with pytest.raises(RuntimeError, match="1 requests running"):
        loaded.update_weights(model.named_parameters(), version=4)
    assert loaded.version == 3  # refused before anything was touched
    with pytest.raises(RuntimeError, match="1 requests running"):
        loaded.sleep()
    assert len(run(loaded)["a"].token_ids) == 5


def test_a_sleeping_engine_takes_weights_but_no_requests(loaded, model):
    expected = loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])[0].token_ids
    loaded.sleep()
    loaded.sleep()
    with pytest.raises(RuntimeError, match="wake"):
        loaded.submit("a", [4], SamplingParams(), seed=0)
    loaded.update_weights(model.named_parameters(), version=4)
    loaded.wake()
    loaded.wake()
    assert loaded.generate([[4, 5]], SamplingParams(max_tokens=6), [0])[0].token_ids == expected


def test_broken_weights_are_an_error_and_not_tokens(loaded, model):
    loaded.update_weights([(name, torch.full_like(p, torch.nan)) for name, p in model.named_parameters()], version=9)
    with pytest.raises(RuntimeError, match="version 9"):
        loaded.generate([[4]] * 6, SamplingParams(max_tokens=2), range(6))
    assert loaded.unfinished == 0
    loaded.update_weights(model.named_parameters(), version=10)  # nothing of it stays behind
    assert len(loaded.generate([[4]], SamplingParams(max_tokens=2), [0])[0].token_ids) == 2


def test_shutdown_twice_is_fine_and_ends_generating(loaded):
    loaded.shutdown()
    loaded.shutdown()
    with pytest.raises(RuntimeError):
        loaded.submit("a", [4], SamplingParams(), seed=0)


def test_seeds_differ_by_every_part_and_by_order():
    seeds = [
        derive_seed(),
        derive_seed(0),
        derive_seed(0, 1),
        derive_seed(1, 0),
        derive_seed("0", 1),
        derive_seed(0, 0, 1),
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive_seed(7, 1, 2, 3) == 1825580464272150345  # the same in every process and release
