"""Run under torchrun: attention of sequences spread over a ring against the plain formula; rank 0 writes the errors.

Every case is a function of the same global tensors; the tests look at the errors alone.
"""

import argparse
import itertools
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3Config

from rl2lightning import RingAttention
from rl2lightning.models.attention import AttentionSpec, keep_attention
from rl2lightning.models.blocks import Segments
from rl2lightning.models.blocks_math import Math
from rl2lightning.models.build import build_causal_lm, init_weights, materialize
from rl2lightning.models.packed import pack
from rl2lightning.models.policy import Policy
from rl2lightning.parallel.mesh import build_meshes
from rl2lightning.parallel.ring import transports
from rl2lightning.parallel.ring.attention import RingedAttention
from rl2lightning.parallel.ring.layout import zigzag
from rl2lightning.types import Sequences


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, ...]
    heads: int = 4
    key_heads: int = 2
    split_from: int | None = 0
    window: int | None = None
    softcap: float | None = None
    row_multiple: int = 1
    gather_heads: int | None = None


CASES = {
    "one_odd": Case((37,)),
    "several_odd": Case((9, 33, 1, 20)),
    "multi_head": Case((21, 10), key_heads=4),
    "multi_query": Case((21, 10), key_heads=1),
    "whole_and_cut": Case((40, 3, 5, 24, 7), split_from=20),
    "all_whole": Case((6, 9, 4), split_from=100),
    "many_short": Case(tuple(range(1, 14)), split_from=9),
    "ranks_without_rows": Case((5,), split_from=6),
    "softcap": Case((19, 30), softcap=1.5),
    "window": Case((41, 12), window=7),
    "window_and_softcap": Case((41, 12, 5), window=7, softcap=1.5, split_from=8),
    "padded_rows": Case((17, 4), row_multiple=6, split_from=5),
    "one_head_at_a_time": Case((23,), heads=6, key_heads=3, gather_heads=1),
    "two_heads_then_one": Case((23,), heads=6, key_heads=3, gather_heads=2),
}
HEAD_SIZE = 8


def plain(q: Tensor, k: Tensor, v: Tensor, case: Case) -> Tensor:
    """Softmax over the keys that a mask leaves, all sequences in one matrix: [n, H, D]."""
    owner = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))
    seen = (owner[:, None] == owner) & (distance >= 0)
    if case.window is not None:
        seen &= distance < case.window
    groups = case.heads // case.key_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.einsum("ihd,jhd->hij", q, k) * HEAD_SIZE**-0.5
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours.double() - reference).abs().max() / reference.abs().max())


def run(case: Case, transport: str, dtype: torch.dtype) -> dict[str, float]:
    """Largest relative errors of output and gradients, over all ranks."""
    g = torch.Generator().manual_seed(0)
    n = sum(case.lengths)
    shapes = [(n, case.heads), (n, case.key_heads), (n, case.key_heads), (n, case.heads)]
    q, k, v, dout = (torch.randn(*shape, HEAD_SIZE, generator=g, dtype=torch.float64) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    reference = plain(q, k, v, case)
    expected = [reference, *torch.autograd.grad(reference, leaves, dout)]

    rank, size = dist.get_rank(), dist.get_world_size()
    layout = zigzag(case.lengths, size, split_from=case.split_from, row_multiple=case.row_multiple)
    attention = RingedAttention.of(
        layout, dist.group.WORLD, transport=transport, backend="math", gather_heads=case.gather_heads
    )
    tokens = layout.rows(rank)[0]
    assert len(tokens) % case.row_multiple == 0
    assert len(tokens) > 0
    real = (tokens >= 0)[:, None, None]
    # what stands on padding is never looked at: make it large, and let nothing flow back from it
    mine = [torch.where(real, x.detach()[tokens.clamp(min=0)], 50.0).to(dtype).requires_grad_() for x in leaves]
    spec = AttentionSpec(HEAD_SIZE**-0.5, case.window, case.softcap)
    out = attention(*mine, spec)
    gradients = torch.autograd.grad(out, mine, torch.where(real, dout[tokens.clamp(min=0)], 0.0).to(dtype))

    errors = {}
    for name, rows, whole in zip(("out", "dq", "dk", "dv"), (out, *gradients), expected, strict=True):
        ours = torch.zeros_like(whole).index_add_(
            0, tokens.clamp(min=0), torch.where(real, rows.detach(), 0.0).double()
        )
        dist.all_reduce(ours)
        errors[name] = relative_error(ours, whole.detach())
        assert torch.isfinite(rows).all()
    return errors


# ---- ring-flash-attn, its kernels replaced by the mathematics


def fake_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
    leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    rows = [Segments.of(cu.diff().tolist()) for cu in (cu_seqlens_q, cu_seqlens_k)]
    out, lse = Math().forward(q, k, v, *rows, causal, AttentionSpec(softmax_scale))
    return out.to(q.dtype), lse, None, None


def fake_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    rows = [Segments.of(cu.diff().tolist()) for cu in (cu_seqlens_q, cu_seqlens_k)]
    grads = Math().backward(dout, q, k, v, out, softmax_lse, *rows, causal, AttentionSpec(softmax_scale))
    for target, grad in zip((dq, dk, dv), grads, strict=True):
        target.copy_(grad)


def package_errors() -> dict[str, float]:
    """Of the transport `package` in bf16, whose backward is wrong in fp32 by design: it takes its own copies."""
    kernels = types.ModuleType("flash_attn.flash_attn_interface")
    kernels._flash_attn_varlen_forward, kernels._flash_attn_varlen_backward = fake_forward, fake_backward
    kernels._flash_attn_forward, kernels._flash_attn_backward = fake_forward, fake_backward
    parent = types.ModuleType("flash_attn")
    parent.flash_attn_interface = kernels
    modules = {"flash_attn": parent, "flash_attn.flash_attn_interface": kernels}
    serves = mock.patch.object(transports.Package, "backend", return_value=Math())
    with mock.patch.dict(sys.modules, modules), serves:
        return run(Case((40, 3, 21), split_from=20), "package", torch.bfloat16)


# ---- a model under the plugin


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = Qwen3Config(
            vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, initializer_range=0.3,
        )  # fmt: skip
        lm = build_causal_lm(config, torch.float32)
        materialize(lm, torch.device("cpu"))
        init_weights(lm, config, 0)
        self.policy = Policy(lm).train()
        self._device_mesh = build_meshes("cpu", (1, 1, dist.get_world_size(), 1)).root


def gradients(module: Module, seqs: Sequences) -> tuple[Tensor, Tensor, int]:
    """Log-probs [n], the gradient of their weighted sum on this rank, and how often the ring was run for it."""
    module.zero_grad()
    count = mock.patch.object(RingedAttention, "forward", autospec=True, side_effect=RingedAttention.forward)
    with count as forward:
        ready = module.policy.pack(seqs, torch.device("cpu"), torch.float32)
        logps, _ = module.policy(ready, temperature=1.0)
        weights = torch.randn(seqs.num_tokens, generator=torch.Generator().manual_seed(1))
        (logps * weights).sum().backward()
    return logps.detach(), torch.cat([p.grad.flatten() for p in module.parameters()]), forward.call_count


def model_case() -> dict[str, float]:
    """A policy spread over the ring, without and with checkpointing, against the same policy on one process."""
    module, g = Module(), torch.Generator().manual_seed(0)
    ids = [torch.randint(1, 61, (n,), generator=g).tolist() for n in (23, 5, 2, 40)]
    seqs = Sequences.from_lists(ids, [[False] + [True] * (len(x) - 1) for x in ids])
    logps, grads, calls = gradients(module, seqs)
    assert calls == 0
    plugin, results = RingAttention(split_from=20), {}
    assert plugin.apply(module) is module
    checkpointing = {"none": None, "full": {}, "selective": {"context_fn": keep_attention}}
    for name, settings in checkpointing.items():
        if settings is not None:
            module.policy.lm.gradient_checkpointing_enable({"use_reentrant": False, **settings})
        ours, mine, results[f"{name}/calls"] = gradients(module, seqs)
        dist.all_reduce(mine)  # every rank holds the gradient of its own rows
        results[f"{name}/logps"] = relative_error(ours, logps.double())
        results[f"{name}/gradient"] = relative_error(mine, grads.double())
    plugin.revert(module)
    results["reverted"] = float(module.policy.pack is pack)
    module.policy.lm.gradient_checkpointing_disable()
    results["reverted/gradient"] = relative_error(gradients(module, seqs)[1], grads.double())
    return results


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    results = {
        f"{name}/{transport}/{str(dtype).removeprefix('torch.')}": run(case, transport, dtype)
        for (name, case), transport, dtype in itertools.product(
            CASES.items(), ("ring", "gather"), (torch.float32, torch.float64)
        )
    }
    results["model"] = model_case()
    results["package"] = package_errors()
    if dist.get_rank() == 0:
        torch.save(results, args.out)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
