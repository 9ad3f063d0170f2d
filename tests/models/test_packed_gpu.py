"""On a GPU: every attention backend against fp32 mathematics, packed against one by one, and a step in bf16-mixed."""

import lightning as L
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl2lightning import SFT
from rl2lightning.models.attention import AttentionSpec
from rl2lightning.models.blocks import BlockBackend, Demand, Segments
from rl2lightning.models.blocks_math import Math
from rl2lightning.models.kernels import BACKENDS
from rl2lightning.models.packed import PACKED_ATTENTION, WholeSequences, pack, register_packed_attention
from rl2lightning.models.policy import Policy
from rl2lightning.types import Sequences

pytestmark = pytest.mark.gpu


def sequences(lengths: list[int]) -> Sequences:
    g = torch.Generator().manual_seed(0)
    ids = [torch.randint(6, 100, (n,), generator=g).tolist() for n in lengths]
    return Sequences.from_lists(ids, [[False] + [True] * (n - 1) for n in lengths])


SHAPES = {  # causal, lengths of the queries, lengths of the keys
    "square_causal": (True, [300, 512, 1], [300, 512, 1]),
    "bottom_right": (True, [64, 100], [256, 100]),
    "full": (False, [128, 200], [300, 77]),
    "one_query": (True, [1], [40]),
    "many_short": (True, [1, 2, 3, 5, 8, 13] * 20, [1, 2, 3, 5, 8, 13] * 20),
}
SPECS = {
    "plain": AttentionSpec(0.1),
    "window": AttentionSpec(0.1, window=50),
    "softcap": AttentionSpec(0.1, softcap=5.0),
}


def rows(n: int, heads: int, head_size: int) -> torch.Tensor:
    return torch.randn(n, heads, head_size, device="cuda", dtype=torch.bfloat16)


def rms_error(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.float() - reference.float()).square().mean().sqrt() / reference.float().square().mean().sqrt())


@pytest.mark.parametrize(("head_size", "key_heads"), [(128, 2), (128, 1), (64, 8), (256, 2)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("backend", [b for b in BACKENDS if not isinstance(b, Math)], ids=lambda b: b.name)
def test_a_backend_computes_what_the_mathematics_does(
    backend: BlockBackend, shape: str, spec: AttentionSpec, head_size: int, key_heads: int
) -> None:
    """Output and log-sum-exp; and the backward pass of some keys, of a row of scores that has others besides."""
    causal, queries, keys = SHAPES[shape]
    if spec.window is not None and not causal:
        pytest.skip("a window is over a past")
    cu_q, cu_k = (Segments.of(lengths).to(torch.device("cuda")) for lengths in (queries, keys))
    torch.manual_seed(0)
    q, dout = (rows(cu_q.total, 8, head_size) for _ in range(2))
    k, v = (rows(cu_k.total, key_heads, head_size) for _ in range(2))
    if (reason := backend.refusal(Demand.of(q, spec, cu_q, square=queries == keys or not causal))) is not None:
        pytest.skip(reason)
    out, lse = Math().forward(q, k, v, cu_q, cu_k, causal, spec)
    ours, our_lse = backend.forward(q, k, v, cu_q, cu_k, causal, spec)
    assert rms_error(ours, out) < 5e-3
    assert float((our_lse - lse).abs().max()) < 5e-3
    whole = (0.5 * out).to(q.dtype), lse + torch.tensor(2.0, device="cuda").log()
    expected = Math().backward(dout, q, k, v, *whole, cu_q, cu_k, causal, spec)
    grads = backend.backward(dout, q, k, v, *whole, cu_q, cu_k, causal, spec)
    for name, a, b in zip(("dq", "dk", "dv"), grads, expected, strict=True):
        assert rms_error(a, b) < 1e-2, name


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.name)
def test_strided_heads_are_taken_as_they_are(backend: BlockBackend) -> None:
    """The gather transport hands over some heads of a tensor of more."""
    lengths = Segments.of([100, 28]).to(torch.device("cuda"))
    q, dout, k, v = (rows(128, heads, 64) for heads in (8, 8, 4, 4))
    spec = SPECS["plain"]
    if (reason := backend.refusal(Demand.of(q, spec, lengths))) is not None:
        pytest.skip(reason)
    some = [q[:, 2:6], k[:, 1:3], v[:, 1:3]]
    outcomes = []
    for inputs in (some, [x.contiguous() for x in some]):
        out, lse = backend.forward(*inputs, lengths, lengths, True, spec)
        out = out.to(q.dtype)
        outcomes.append((out, lse, *backend.backward(dout[:, 2:6], *inputs, out, lse, lengths, lengths, True, spec)))
    for ours, expected in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours.float(), expected.float(), rtol=2e-2, atol=2e-2)


def test_the_op_carries_gradients_as_the_mathematics_does() -> None:
    """Through autograd, by the backend that is chosen."""
    torch.manual_seed(0)
    segments = Segments.of([700, 3, 300]).to(torch.device("cuda"))
    leaves = [rows(1003, heads, 64).requires_grad_() for heads in (8, 2, 2)]
    dout = rows(1003, 8, 64)
    grads = [
        torch.autograd.grad(WholeSequences(segments, name)(*leaves, SPECS["plain"]), leaves, dout)
        for name in ("auto", "math")
    ]
    for ours, expected in zip(*grads, strict=True):
        assert rms_error(ours, expected) < 1e-2


def test_packed_attention_equals_one_by_one(make_model) -> None:
    path = make_model(head_dim=64)
    register_packed_attention()
    device, lengths = torch.device("cuda"), [3, 50, 17, 200, 2]
    seqs = sequences(lengths)
    packed = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=PACKED_ATTENTION)
    exact = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(device)
    with torch.no_grad():
        ours, _ = Policy(packed.to(device))(pack(seqs, device, torch.bfloat16), temperature=1.0)
        theirs = []
        for i in range(len(seqs)):
            ids = seqs.select([i]).input_ids[None].to(device)
            logps = exact(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            theirs += [logps.new_zeros(1), logps]
    gap = (ours - torch.cat(theirs)).abs()
    assert float(gap.mean()) < 0.05  # bf16 against fp32; a sequence that saw its neighbour is off by more than 1
    assert float(gap.max()) < 0.5


def test_a_bf16_step_has_fp32_masters_and_the_loss_of_fp32(tiny_model: str) -> None:
    import cases

    losses = {}
    for precision in ("32-true", "bf16-mixed"):
        module = SFT(tiny_model, max_tokens_per_device=64)
        trainer = L.Trainer(
            strategy="fsdp2_tp",
            accelerator="gpu",
            devices=1,
            precision=precision,
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, datamodule=cases.Share(cases.batch([20, 30, 9]), cases.ChatBatch))
        losses[precision] = float(trainer.callback_metrics["train/loss"])
        assert {p.dtype for p in module.policy.parameters()} == {torch.float32}
    assert losses["bf16-mixed"] == pytest.approx(losses["32-true"], rel=2e-2)
