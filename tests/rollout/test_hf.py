from __future__ import annotations

import pytest
import torch

from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.types import SamplingParams


def start(model, path, *, max_num_seqs: int = 256, **spec) -> HFEngine:
    model.config.save_pretrained(path)
    engine = HFEngine(max_num_seqs)
    engine.start(EngineSpec(str(path), "cpu", torch.float32, **spec))
    engine.update_weights(model.state_dict().items(), version=0)
    return engine


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes [rows, columns] of the inputs of every forward of an engine."""
    shapes: list[tuple[int, ...]] = []
    forward = HFEngine._forward

    def spy(self, input_ids, *args):
        shapes.append(tuple(input_ids.shape))
        return forward(self, input_ids, *args)

    monkeypatch.setattr(HFEngine, "_forward", spy)
    return shapes


def test_samples_of_a_prompt_share_its_prefill(model, tmp_path, forwards):
    engine = start(model, tmp_path)
    engine.generate([[4, 5, 6]] * 8 + [[7, 8, 9]] * 8, SamplingParams(max_tokens=3), range(16))
    assert forwards == [(2, 3), (16, 1), (16, 1)]


def test_finished_rows_leave_once_they_are_a_quarter(model, tmp_path, forwards):
    engine = start(model, tmp_path)
    for i in range(8):
        engine.submit(f"{i}", [4 + i], SamplingParams(max_tokens=2 + i), seed=i)
    finished = []
    while engine.unfinished:
        finished += [(c.request_id, len(c.token_ids)) for c in engine.step()]
    assert finished == [(f"{i}", 2 + i) for i in range(8)]  # each once, though rows stay for a while
    # one row ends per step from the second on: of 8 two are a quarter, of 6 two, of 4 one, and so on
    assert [rows for rows, _ in forwards[1:]] == [8, 8, 6, 6, 4, 3, 2, 1]


def test_no_more_rows_than_max_num_seqs_are_decoded(model, tmp_path, forwards):
    engine = start(model, tmp_path, max_num_seqs=3)
    completions = engine.generate([[4 + i] for i in range(10)], SamplingParams(max_tokens=5), range(10))
    assert all(len(c.token_ids) == 5 for c in completions)
    assert max(rows for rows, _ in forwards) == 3


def test_long_completions_outgrow_the_spare_room_of_the_cache(model, tmp_path, processed):
    engine = start(model, tmp_path)
    for prompt, c in zip(
        ([4], [5] * 9), engine.generate([[4], [5] * 9], SamplingParams(max_tokens=200), [0, 1]), strict=True
    ):
        assert len(c.token_ids) == 200
        expected = processed(model, prompt, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logps), expected, atol=2e-5, rtol=0)


def test_a_large_prefill_is_cut_and_gives_the_same(model, tmp_path, forwards, monkeypatch):
    prompts = [[4 + i] * (1 + i) for i in range(12)]
    engine = start(model, tmp_path)
    whole = engine.generate(prompts, SamplingParams(max_tokens=6), range(12))
    assert forwards[0] == (12, 12)
    forwards.clear()
    monkeypatch.setattr("rl2lightning.rollout.hf._MAX_MASK_ELEMENTS", 200)
    cut = engine.generate(prompts, SamplingParams(max_tokens=6), range(12))
    prefills = [shape for shape in forwards if shape[1] > 1]
    assert len(prefills) > 3
    assert all(rows * length**2 <= 200 for rows, length in prefills)
    assert [c.token_ids for c in cut] == [c.token_ids for c in whole]


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=60,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=40,
            tie_word_embeddings=False,
        )
    )


def gpt2():
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=40, n_embd=32, n_layer=2, n_head=4))


@pytest.mark.parametrize("build", [llama, gpt2])
def test_untied_weights_and_learned_positions(build, tmp_path, processed):
    torch.manual_seed(0)
    model = build().eval()
    engine = start(model, tmp_path, max_num_seqs=6)
    prompts = [[1 + i] * (1 + 3 * i) for i in range(8)]
    for prompt, c in zip(prompts, engine.generate(prompts, SamplingParams(max_tokens=39), range(8)), strict=True):
        assert len(prompt) + len(c.token_ids) == 40  # to the last position there is
        expected = processed(model, prompt, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logps), expected, atol=1e-5, rtol=0)


def test_different_values_for_one_tied_weight_are_refused(model, tmp_path):
    engine = start(model, tmp_path)
    weights = [*model.named_parameters(), ("lm_head.weight", model.lm_head.weight + 1)]
    with pytest.raises(ValueError, match=r"'lm_head.weight' is tied"):
        engine.update_weights(weights, version=1)
    assert engine.version is None


def test_weights_are_cast_to_the_engines_dtype(model, tmp_path, processed):
    model.config.save_pretrained(tmp_path)
    engine = HFEngine()
    engine.start(EngineSpec(str(tmp_path), "cpu", torch.bfloat16))
    engine.update_weights(model.named_parameters(), version=0)
    (c,) = engine.generate([[4, 5]], SamplingParams(max_tokens=20), [0])
    gap = (torch.tensor(c.logps) - processed(model, [4, 5], c.token_ids)).abs()
    assert 1e-4 < gap.mean() < 0.2  # near the fp32 model, and visibly rounded


def test_sliding_window_models_are_refused(tmp_path):
    from transformers import MistralConfig

    MistralConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, sliding_window=8
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="full attention only, and a mistral model"):
        HFEngine().start(EngineSpec(str(tmp_path), "cpu", torch.float32))


def test_a_longer_context_than_the_model_has_is_refused(model, model_path):
    with pytest.raises(ValueError, match="max_model_len=257 exceeds the 256"):
        HFEngine().start(EngineSpec(str(model_path), "cpu", torch.float32, max_model_len=257))


def test_room_for_no_request_at_all_is_refused():
    with pytest.raises(ValueError, match="max_num_seqs=0"):
        HFEngine(max_num_seqs=0)
