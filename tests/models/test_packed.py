"""Packed log-probs against one forward per sequence of the same Hugging Face model with its own attention."""

import random
from copy import deepcopy

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from rl2lightning.models.build import build_causal_lm, materialize
from rl2lightning.models.packed import pack, packed_attention
from rl2lightning.models.policy import Policy
from rl2lightning.types import Sequences

SIZE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES = {
    "plain": (Qwen3, Qwen3Config(**SIZE, tie_word_embeddings=True)),
    "sliding_window": (MistralForCausalLM, MistralConfig(**SIZE, sliding_window=5)),
    # soft-capped scores and logits, every other layer windowed, scores scaled by another number than the head's size
    "soft_capping": (
        Gemma2ForCausalLM,
        Gemma2Config(
            **SIZE, sliding_window=6, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, query_pre_attn_scalar=20
        ),
    ),
}
LENGTHS = {
    "one_sequence": [12],
    "equal": [9, 9, 9],
    "uneven": [3, 30, 4, 17, 2, 16, 31, 8],
    "with_single_tokens": [1, 5, 1],
}


def both(family: str):
    """A Hugging Face model with plain attention, and the packed policy of the same weights."""
    cls, config = FAMILIES[family]
    with torch.random.fork_rng():
        torch.manual_seed(1)
        plain = cls._from_config(deepcopy(config), attn_implementation="eager").eval()
    lm = build_causal_lm(deepcopy(config), torch.float32)  # a model keeps its config and writes into it
    materialize(lm, torch.device("cpu"))
    lm.load_state_dict(plain.state_dict())
    return plain, Policy(lm)


def random_sequences(lengths: list[int], seed: int = 0) -> Sequences:
    """All tokens but the first of each are actions, some at random left out."""
    g = torch.Generator().manual_seed(seed)
    ids = [torch.randint(1, 61, (n,), generator=g).tolist() for n in lengths]
    masks = [[False] + (torch.rand(n - 1, generator=g) < 0.7).tolist() for n in lengths]
    return Sequences.from_lists(ids, masks)


def one_by_one(plain, seqs: Sequences, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies [N], 0 off actions."""
    logps, entropies = torch.zeros(seqs.num_tokens), torch.zeros(seqs.num_tokens)
    for start, end in zip(seqs.cu_seqlens[:-1].tolist(), seqs.cu_seqlens[1:].tolist(), strict=True):
        ids = seqs.input_ids[start:end]
        log_softmax = (plain(input_ids=ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
        logps[start + 1 : end] = log_softmax.gather(1, ids[1:, None])[:, 0]
        entropies[start + 1 : end] = -(log_softmax.exp() * log_softmax).sum(-1)
    return logps * seqs.action_mask, entropies * seqs.action_mask


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logps_are_those_of_one_sequence_at_a_time(family: str, lengths: str) -> None:
    plain, policy = both(family)
    seqs = random_sequences(LENGTHS[lengths])
    with torch.no_grad():
        expected, expected_entropies = one_by_one(plain, seqs, 0.7)
        logps, entropies = policy(pack(seqs, torch.device("cpu"), torch.float32), temperature=0.7, entropy=True)
    torch.testing.assert_close(logps, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropies, rtol=1e-5, atol=1e-5)
    assert not seqs.action_mask.any() or float(expected.abs().max()) > 1  # lively enough to tell attentions apart


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_gradients_are_those_of_one_sequence_at_a_time(family: str) -> None:
    plain, policy = both(family)
    seqs = random_sequences(LENGTHS["uneven"])
    weights = torch.randn(seqs.num_tokens, generator=torch.Generator().manual_seed(3))
    (one_by_one(plain, seqs, 1.0)[0] * weights).sum().backward()
    (policy(pack(seqs, torch.device("cpu"), torch.float32), temperature=1.0)[0] * weights).sum().backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), policy.lm.named_parameters(), strict=True):
        largest = float(p.grad.abs().max())
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-5 * largest, msg=lambda m, n=name: f"{n}: {m}")


def test_without_its_window_and_its_caps_a_model_is_another() -> None:
    """The two exotic families above do exercise what they are there for."""
    seqs = random_sequences([30])
    with torch.no_grad():
        for family, changes in (("sliding_window", "sliding_window"), ("soft_capping", "attn_logit_softcapping")):
            plain, _ = both(family)
            with_it = one_by_one(plain, seqs, 1.0)[0]
            cls, config = FAMILIES[family]
            other = cls._from_config(
                type(config)(**{**config.to_diff_dict(), changes: None}), attn_implementation="eager"
            )
            other.load_state_dict(plain.state_dict())
            assert float((one_by_one(other.eval(), seqs, 1.0)[0] - with_it).abs().max()) > 1e-2


def test_no_sequence_sees_another() -> None:
    _, policy = both("plain")
    seqs = random_sequences([6, 7, 20])
    changed = seqs.replace(input_ids=seqs.input_ids.clone())
    changed.input_ids[6:13] = torch.randint(1, 61, (7,), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        before, after = (
            policy(pack(s, torch.device("cpu"), torch.float32), temperature=1.0)[0] for s in (seqs, changed)
        )
    others = torch.ones(33, dtype=torch.bool)
    others[6:13] = False
    torch.testing.assert_close(after[others], before[others], rtol=0, atol=1e-6)
    assert float((after - before)[6:13].abs().max()) > 1e-2


def test_a_token_does_not_see_those_after_it() -> None:
    for family in FAMILIES:
        _, policy = both(family)
        seqs = random_sequences([5, 24])
        changed = seqs.replace(input_ids=seqs.input_ids.clone())
        changed.input_ids[20:] = 3
        with torch.no_grad():
            before, after = (
                policy(pack(s, torch.device("cpu"), torch.float32), temperature=1.0)[0] for s in (seqs, changed)
            )
        torch.testing.assert_close(after[:20], before[:20], rtol=0, atol=1e-6)
        assert not torch.equal(after[20:], before[20:])


# ---- the layout


@pytest.mark.parametrize("seed", range(20))
def test_buckets_hold_every_token_once_with_little_padding(seed: int) -> None:
    draw = random.Random(seed)
    lengths = [draw.randint(1, 60) for _ in range(draw.randint(1, 25))]
    layout = pack(random_sequences(lengths), torch.device("cpu"), torch.float32).layout.attention
    real = torch.cat([b.tokens[b.slots] for b in layout.buckets])
    assert sorted(real.tolist()) == list(range(sum(lengths)))
    # `restore` undoes the order of the buckets
    restored = real if layout.restore is None else real[layout.restore]
    assert restored.tolist() == list(range(sum(lengths)))
    sequence_of = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    for b in layout.buckets:
        assert len(b.slots) >= 0.75 * b.num_sequences * b.length  # at most a quarter is padding
        for row in b.tokens.view(b.num_sequences, b.length):
            assert len(sequence_of[row].unique()) == 1  # padding repeats a token of its own sequence
    assert sum(b.num_sequences for b in layout.buckets) == len(lengths)


def test_equal_lengths_are_one_bucket_that_needs_no_reordering() -> None:
    layout = pack(random_sequences([7] * 5), torch.device("cpu"), torch.float32).layout
    assert [(b.num_sequences, b.length) for b in layout.attention.buckets] == [(5, 7)]
    assert layout.attention.restore is None
    assert layout.max_length == 7


def test_layout_by_hand() -> None:
    seqs = Sequences.from_lists([[5, 6, 7], [8, 9]], [[False, False, True], [False, True]])
    layout = pack(seqs, torch.device("cpu"), torch.float32).layout
    assert layout.position_ids.tolist() == [0, 1, 2, 0, 1]
    assert layout.input_ids.tolist() == [5, 6, 7, 8, 9]
    assert layout.actions.tolist() == [2, 4]
    assert layout.predictors.tolist() == [1, 3]
    assert layout.targets.tolist() == [7, 9]
    assert layout.last_rows.tolist() == [2, 4]
    assert layout.last_of.tolist() == [0, 1]
    # the shorter first, its last token repeated where it is padded: (5 real of 6 slots, a sixth of padding)
    assert [b.tokens.tolist() for b in layout.attention.buckets] == [[3, 4, 4, 0, 1, 2]]
    assert layout.attention.buckets[0].slots.tolist() == [0, 1, 3, 4, 5]
    assert layout.attention.restore is not None
    assert layout.attention.restore.tolist() == [2, 3, 4, 0, 1]


def test_what_is_packed_is_not_packed_again() -> None:
    packed = pack(random_sequences([4, 9]), torch.device("cpu"), torch.float32)
    assert pack(packed, torch.device("cpu"), torch.float32) is packed


def test_attention_sinks_are_refused() -> None:
    layout = pack(random_sequences([4]), torch.device("cpu"), torch.float32).layout
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="attention sinks"):
        packed_attention(torch.nn.Identity(), x, x, x, None, packed=layout, s_aux=torch.zeros(2))
