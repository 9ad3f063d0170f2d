"""Packed log-probs against one forward per sequence of the same Hugging Face model with its own attention."""

import random
from copy import deepcopy

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Gemma2Config, Gemma2ForCausalLM, MistralConfig, MistralForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from rl2lightning.models.attention import AttentionSpec, keep_attention
from rl2lightning.models.blocks import Segments
from rl2lightning.models.build import build_causal_lm, decoder_blocks, materialize
from rl2lightning.models.packed import Bucketed, WholeSequences, pack, packed_attention
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


def test_rows_are_padded_to_a_multiple() -> None:
    seqs = random_sequences([4, 9])
    layout = pack(seqs, torch.device("cpu"), torch.float32, row_multiple=5).layout
    assert layout.input_ids.tolist() == [*seqs.input_ids.tolist(), 0, 0]
    assert layout.position_ids.tolist() == [*range(4), *range(9), 0, 1]
    _, policy = both("plain")
    plain, padded = (
        policy(pack(seqs, torch.device("cpu"), torch.float32, row_multiple=n), temperature=1.0)[0] for n in (1, 5)
    )
    torch.testing.assert_close(padded, plain, rtol=1e-6, atol=1e-6)


# ---- kernels over packed rows, of which the mathematics runs anywhere


@pytest.mark.parametrize("family", FAMILIES)
def test_a_kernel_named_is_used_and_gives_the_same(family: str) -> None:
    _, policy = both(family)
    seqs = random_sequences(LENGTHS["uneven"])
    outcomes = []
    for backend in ("auto", "math"):
        policy.zero_grad()
        packed = pack(seqs, torch.device("cpu"), torch.float32, backend=backend)
        logps, _ = policy(packed, temperature=1.0)
        logps.square().sum().backward()
        outcomes.append((logps, torch.cat([p.grad.flatten() for p in policy.parameters()])))
        assert isinstance(packed.layout.attention, WholeSequences if backend == "math" else Bucketed)
    torch.testing.assert_close(outcomes[1][0], outcomes[0][0], rtol=1e-5, atol=1e-5)
    largest = float(outcomes[0][1].abs().max())
    torch.testing.assert_close(outcomes[1][1], outcomes[0][1], rtol=1e-4, atol=1e-5 * largest)


def test_dropout_takes_the_buckets_where_a_kernel_was_named() -> None:
    rows, whole = torch.randn(12, 2, 8), WholeSequences(Segments.of([5, 7]), "math")
    torch.manual_seed(0)
    ours = whole(rows, rows, rows, AttentionSpec(0.3, dropout=0.5))
    torch.manual_seed(0)
    buckets = Bucketed.of([5, 7])(rows, rows, rows, AttentionSpec(0.3, dropout=0.5))
    torch.testing.assert_close(ours, buckets, rtol=0, atol=0)
    assert not torch.allclose(ours, whole(rows, rows, rows, AttentionSpec(0.3)))


class Attentions(TorchDispatchMode):
    """Counts the passes through attention that autograd sees."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        aten, ours = torch.ops.aten, torch.ops.rl2lightning
        self.calls += func in (aten._scaled_dot_product_flash_attention_for_cpu.default, ours.attend.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_selective_checkpointing_attends_once(backend: str) -> None:
    _, policy = both("plain")
    policy.train()
    seqs = random_sequences([9, 9, 9])  # one bucket
    outcomes = {}
    for name, settings in {"none": None, "full": {}, "selective": {"context_fn": keep_attention}}.items():
        policy.zero_grad()
        if settings is not None:
            policy.lm.gradient_checkpointing_enable({"use_reentrant": False, **settings})
        with Attentions() as counter:
            packed = pack(seqs, torch.device("cpu"), torch.float32, backend=backend)
            policy(packed, temperature=1.0)[0].sum().backward()
        outcomes[name] = counter.calls, torch.cat([p.grad.flatten() for p in policy.parameters()])
    assert {name: calls for name, (calls, _) in outcomes.items()} == {"none": 2, "full": 4, "selective": 2}
    assert torch.equal(outcomes["selective"][1], outcomes["none"][1])
    assert torch.equal(outcomes["full"][1], outcomes["none"][1])


@pytest.mark.parametrize("backend", ["auto", "math"])
def test_compiled_blocks_are_not_compiled_anew_for_each_micro_batch(backend: str) -> None:
    torch._dynamo.reset()  # which remembers lengths of other tests
    plain, policy = both("plain")
    graphs = CompileCounter()  # counts, and runs what it is given
    for block in decoder_blocks(policy.lm):
        block.compile(backend=graphs)
    frames = []
    for seed, lengths in enumerate(([3, 9], [4, 7, 8], [5, 6], [11, 2, 3], [20, 3], [1, 2, 3, 4])):
        seqs = random_sequences(lengths, seed)
        logps, _ = policy(pack(seqs, torch.device("cpu"), torch.float32, backend=backend), temperature=1.0)
        logps.sum().backward()
        torch.testing.assert_close(logps.detach(), one_by_one(plain, seqs, 1.0)[0].detach(), rtol=1e-5, atol=1e-5)
        frames.append(graphs.frame_count)
    assert frames[0] < frames[1] == frames[-1]  # once for these lengths, once for any


def test_what_is_packed_is_not_packed_again() -> None:
    packed = pack(random_sequences([4, 9]), torch.device("cpu"), torch.float32)
    assert pack(packed, torch.device("cpu"), torch.float32) is packed


def test_attention_sinks_are_refused() -> None:
    layout = pack(random_sequences([4]), torch.device("cpu"), torch.float32).layout
    x = torch.zeros(1, 2, 4, 8)
    with pytest.raises(ValueError, match="attention sinks"):
        packed_attention(torch.nn.Identity(), x, x, x, None, packed=layout, s_aux=torch.zeros(2))
