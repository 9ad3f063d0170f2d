"""The mathematics behind the kernels against plain softmax, and which kernels are chosen."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rl2lightning.models import blocks, blocks_math, kernels
from rl2lightning.models.attention import AttentionSpec
from rl2lightning.models.blocks import Demand, Segments
from rl2lightning.models.blocks_math import Math
from rl2lightning.models.kernels import BACKENDS, choose_backend

HEAD_SIZE = 8
SHAPES = {  # causal, lengths of the queries, lengths of the keys
    "square_causal": (True, [5, 9, 1], [5, 9, 1]),
    "bottom_right": (True, [3, 4], [10, 4]),
    "full": (False, [6, 2], [11, 3]),
    "one_query": (True, [1], [7]),
}
SPECS = {
    "plain": AttentionSpec(0.3),
    "window": AttentionSpec(0.3, window=3),
    "softcap": AttentionSpec(0.3, softcap=1.5),
}


def plain(q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int], causal: bool, spec: AttentionSpec):
    """Output [m, H, D] and log-sum-exp [H, m], segment by segment."""
    groups, outs, lses = q.shape[1] // k.shape[1], [], []
    for x, y, z in zip(q.split(queries), k.split(keys), v.split(keys), strict=True):
        y, z = y.repeat_interleave(groups, 1), z.repeat_interleave(groups, 1)
        scores = torch.einsum("ihd,jhd->hij", x, y) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        distance = torch.arange(len(y) - len(x), len(y))[:, None] - torch.arange(len(y))
        hidden = torch.zeros_like(distance, dtype=torch.bool)
        if causal:
            hidden |= distance < 0
        if spec.window is not None:
            hidden |= distance >= spec.window
        scores = scores.masked_fill(hidden, -torch.inf)
        outs.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), z))
        lses.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(lses, 1)


@pytest.mark.parametrize("tile", [2**28, 1])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mathematics(shape: str, spec: AttentionSpec, key_heads: int, tile: int, monkeypatch) -> None:
    """Whole and row by row."""
    monkeypatch.setattr(blocks_math, "_SCORES", tile)
    causal, queries, keys = SHAPES[shape]
    if not causal and spec.window is not None:
        keys = queries  # a window is over a past: each query must see some key
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(sum(queries), 4, HEAD_SIZE, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(sum(keys), key_heads, HEAD_SIZE, generator=g, dtype=torch.float64) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = plain(*leaves, queries, keys, causal, spec)
    grads = torch.autograd.grad(out, leaves, dout)
    with torch.no_grad():
        rows = Segments.of(queries), Segments.of(keys)
        ours, our_lse = Math().forward(*leaves, *rows, causal, spec)
        our_grads = Math().backward(dout, *leaves, out, lse, *rows, causal, spec)
    torch.testing.assert_close(our_lse, lse, rtol=1e-13, atol=1e-13)
    for x, y in zip((ours, *our_grads), (out, *grads), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


def test_blocks_of_keys_add_up_to_the_gradient_of_them_all() -> None:
    """Given output and log-sum-exp over all keys, each block's backward is its share."""
    g = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(6, 4, HEAD_SIZE, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(10, 2, HEAD_SIZE, generator=g, dtype=torch.float64) for _ in range(2))
    spec, rows = AttentionSpec(0.3), Segments.of([6])
    out, lse = Math().forward(q, k, v, rows, Segments.of([10]), False, spec)
    dq, dk, dv = Math().backward(dout, q, k, v, out, lse, rows, Segments.of([10]), False, spec)
    parts = [
        Math().backward(dout, q, k[part], v[part], out, lse, rows, Segments.of([n]), False, spec)
        for part, n in ((slice(0, 4), 4), (slice(4, 10), 6))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), dk)
    torch.testing.assert_close(torch.cat([part[2] for part in parts]), dv)


def test_queries_without_keys_have_no_output() -> None:
    q, none = torch.randn(3, 2, HEAD_SIZE), torch.zeros(0, 2, HEAD_SIZE)
    out, lse = Math().forward(q, none, none, Segments.of([3]), Segments.of([0]), False, AttentionSpec(1.0))
    assert not out.any()
    assert (lse == -torch.inf).all()


# ---- the choice

HOPPER = Demand(torch.device("cuda", 0), torch.bfloat16, 128, None, None, 8192.0, True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """Pretends to a GPU of a compute capability and to what is installed."""

    def pretend(capability: tuple[int, int], *packages: str) -> None:
        monkeypatch.setattr(blocks, "_capability", lambda device: capability)
        monkeypatch.setattr(kernels, "installed", lambda name: name in packages)
        monkeypatch.setattr(kernels, "import_error", lambda module: None)

    return pretend


@pytest.mark.parametrize(
    ("capability", "packages", "changes", "chosen"),
    [
        ((9, 0), ("flash-attn-4", "flash-attn"), {}, "fa4"),
        ((9, 0), ("flash-attn",), {}, "cudnn"),
        ((9, 0), ("flash-attn",), {"mean_length": 1000.0}, "flash_attn"),
        ((9, 0), (), {"mean_length": 1000.0}, "aten"),
        ((9, 0), (), {"square": False}, "aten"),
        ((9, 0), (), {"window": 512}, "aten"),
        ((9, 0), (), {"head_size": 256}, "aten"),
        ((9, 0), ("flash-attn",), {"softcap": 50.0}, "flash_attn"),
        ((9, 0), (), {"softcap": 50.0}, "math"),
        ((9, 0), ("flash-attn-4",), {"head_size": 512}, "math"),
        ((9, 0), ("flash-attn-4",), {"dtype": torch.float32}, "math"),
        ((9, 0), ("flash-attn-4",), {"device": torch.device("cpu")}, "math"),
        ((8, 0), ("flash-attn-4",), {}, "aten"),  # no backward there
        ((8, 0), ("flash-attn-4", "flash-attn"), {}, "flash_attn"),
        ((7, 5), ("flash-attn",), {}, "math"),
        ((10, 0), ("flash-attn-4",), {"head_size": 192}, "aten"),
    ],
)
def test_the_fastest_that_can_serve_is_chosen(gpu, capability, packages, changes, chosen) -> None:
    gpu(capability, *packages)
    assert choose_backend("auto", replace(HOPPER, **changes)).name == chosen


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fa4", {}, r"flash-attn-4 is not installed \(pip install 'rl2lightning\[fa4\]'\)"),
        ("flash_attn", {}, "flash-attn is not installed"),
        ("cudnn", {"window": 5}, "neither windows nor soft-capping"),
        ("cudnn", {"square": False}, "transport='ring'"),
        ("cudnn", {"head_size": 256}, "at most 128 channels, not 256"),
        ("aten", {"softcap": 30.0}, "the model's is 30.0.*one of \\['math'\\]"),
        ("aten", {"dtype": torch.float32}, "trainer.precision to bf16-mixed"),
        ("aten", {"head_size": 20}, "head size 20"),
        ("aten", {"device": torch.device("cpu")}, "no GPU"),
    ],
)
def test_what_cannot_serve_is_refused_with_its_reason(gpu, name, changes, reason) -> None:
    gpu((9, 0))
    with pytest.raises(ValueError, match=f"attention backend '{name}' cannot be used here: .*{reason}"):
        choose_backend(name, replace(HOPPER, **changes))


def test_a_package_that_cannot_be_imported_is_passed_over_and_named(gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu((9, 0), "flash-attn-4", "flash-attn")
    said: list[str] = []
    monkeypatch.setattr(kernels, "announce", said.append)
    monkeypatch.setattr(kernels, "import_error", lambda module: "importing it raises" if "cute" in module else None)
    assert choose_backend("auto", replace(HOPPER, mean_length=1000.0)).name == "flash_attn"
    assert said == ["attention backend fa4 is installed and not used: importing it raises"]
    with pytest.raises(ValueError, match="'fa4' cannot be used here: importing it raises"):
        choose_backend("fa4", HOPPER)


def test_why_a_module_cannot_be_imported_is_one_line(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_kernels.py").write_text("import math\nmath.no_such_thing")
    monkeypatch.syspath_prepend(tmp_path)
    error = blocks.import_error("broken_kernels")
    assert error == "importing broken_kernels raises AttributeError: module 'math' has no attribute 'no_such_thing'"
    assert blocks.import_error("math") is None


def test_backends_are_told_apart_by_name() -> None:
    assert len({b.name for b in BACKENDS}) == len(BACKENDS)
