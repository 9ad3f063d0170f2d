"""Attention over a ring of GPUs, forward and backward: every transport and backend, and ring-flash-attn beside them.

    torchrun --nproc-per-node 8 tests/benchmarks/ring_attention.py [32768 131072 ...] [--profile DIRECTORY]

Numbers are packs of one sequence of that length; the pack of one 49k and eight 2k sequences always comes last. What is
not installed is left out. The last lines are the table: milliseconds forward, and forward and backward, TFLOP/s per GPU
of the latter, peak memory, the ratio to ring-flash-attn in the same run, and the largest error of output and gradients,
relative to the largest entry, on a small pack in bf16 against fp32 on one GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from rl2lightning.models.attention import AttentionSpec
from rl2lightning.models.blocks import BackendName, Segments
from rl2lightning.models.blocks_math import Math
from rl2lightning.parallel.ring.attention import RingedAttention, TransportName
from rl2lightning.parallel.ring.layout import zigzag

HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
SPEC = AttentionSpec(HEAD_SIZE**-0.5)
MIXED = [49152] + [2048] * 8
SMALL = [6001, 3000, 517]
RING_BACKENDS: tuple[BackendName, ...] = ("fa4", "cudnn", "flash_attn", "aten")
GATHER_BACKENDS: tuple[BackendName, ...] = ("fa4", "flash_attn")


@dataclass(frozen=True)
class Variant:
    transport: TransportName
    backend: BackendName
    split_from: int | None  # what ring-flash-attn can do is 0: all sequences are cut
    gather_heads: int | None = None

    def __str__(self) -> str:
        heads = "" if self.gather_heads is None else f" {self.gather_heads} heads"
        cut = "" if self.split_from is None else ", all cut"
        return f"{self.transport} {self.backend}{heads}{cut}"


def variants(lengths: list[int]) -> list[Variant]:
    found = [Variant("package", "flash_attn", 0)]
    for split_from in (None, 0) if len(lengths) > 1 else (None,):
        found += [Variant("ring", name, split_from) for name in RING_BACKENDS]
        found += [Variant("gather", name, split_from) for name in GATHER_BACKENDS]
    return [*found, Variant("gather", "fa4", None, KEY_HEADS), Variant("auto", "auto", None)]


def attention_of(lengths: list[int], variant: Variant) -> tuple[RingedAttention, Tensor]:
    """The attention, and the token behind each row of this rank."""
    assert dist.group.WORLD is not None
    layout = zigzag(lengths, dist.get_world_size(), split_from=variant.split_from)
    attention = RingedAttention.of(
        layout,
        dist.group.WORLD,
        transport=variant.transport,
        backend=variant.backend,
        gather_heads=variant.gather_heads,
    )
    return attention.to(torch.device("cuda")), layout.rows(dist.get_rank())[0].cuda()


def together(f: Callable[[], object]) -> tuple[object, str]:
    """The result of f on this rank, or the error of the first rank that has one; every rank must call."""
    result, error = None, ""
    try:
        result = f()
    except Exception as raised:  # the other variants are still worth measuring
        error = f"{type(raised).__name__}: {str(raised)[:200]}"
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return result, next((e for e in errors if e), "")


def milliseconds(f: Callable[[], object], repeat: int) -> float:
    for _ in range(3):
        f()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeat):
        f()
    torch.cuda.synchronize()
    slowest = torch.tensor((time.perf_counter() - start) / repeat * 1e3, device="cuda")
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def measure(lengths: list[int], variant: Variant, repeat: int, profile: Path | None) -> tuple[float, float, float]:
    """Milliseconds forward, milliseconds forward and backward, peak GiB."""
    attention, tokens = attention_of(lengths, variant)
    shapes = ((len(tokens), heads, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS))
    q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def step() -> None:
        torch.autograd.grad(attention(q, k, v, SPEC), leaves, dout)

    both = milliseconds(step, repeat)
    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() / 2**30
    with torch.no_grad():
        forward = milliseconds(lambda: attention(q, k, v, SPEC), repeat)
    if profile is not None:
        with torch.profiler.profile() as profiler:
            step()
            torch.cuda.synchronize()
        if dist.get_rank() == 0:
            print(variant, profiler.key_averages().table(sort_by="cuda_time_total", row_limit=14), flush=True)
            profile.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(profile / f"{variant}_{sum(lengths)}.json".replace(" ", "_")))
    return forward, both, peak


def errors(variant: Variant, reference: tuple[Tensor, ...]) -> float:
    """Largest error of the small pack's output and gradients, relative to the largest entry of each."""
    *inputs, dout = small_pack()
    attention, tokens = attention_of(SMALL, variant)
    real, at = (tokens >= 0)[:, None, None], tokens.clamp(min=0)
    q, k, v = (x[at].requires_grad_() for x in inputs)
    out = attention(q, k, v, SPEC)
    grads = torch.autograd.grad(out, (q, k, v), dout[at] * real)
    worst = 0.0
    for ours, expected in zip((out, *grads), reference, strict=True):
        whole = torch.zeros_like(expected).index_add_(0, at, (ours.detach() * real).float())
        dist.all_reduce(whole)
        worst = max(worst, float((whole - expected).abs().max() / expected.abs().max()))
    return worst


def small_pack() -> list[Tensor]:
    g = torch.Generator("cuda").manual_seed(0)
    shapes = ((sum(SMALL), heads, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS))
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=g) for shape in shapes]


def one_gpu() -> tuple[Tensor, ...]:
    """Output and gradients of the small pack, from bf16 inputs by fp32 mathematics."""
    q, k, v, dout = small_pack()
    rows = Segments.of(SMALL).to(q.device)
    out, lse = Math().forward(q, k, v, rows, rows, True, SPEC)
    return (out, *Math().backward(dout, q, k, v, out, lse, rows, rows, True, SPEC))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lengths", nargs="*", type=int, default=[32768, 131072])
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--only", default="", help="variants whose name contains this, and ring-flash-attn")
    parser.add_argument("--profile", type=Path, help="write a trace of each variant there, and print its kernels")
    args = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
    size, first = dist.get_world_size(), dist.get_rank() == 0
    reference = one_gpu()
    table = [f"{size} x {torch.cuda.get_device_name()}, torch {torch.__version__}"]
    known: dict[Variant, str] = {}
    for lengths in [*([n] for n in args.lengths), MIXED]:
        flop = 3.5 * sum(4 * n * n / 2 * HEADS * HEAD_SIZE for n in lengths) / size
        table.append(f"-- {lengths if len(lengths) == 1 else '[49152] + [2048] * 8'}")
        table.append(f"{'':32} forward ms    both ms   TFLOP/s   peak GiB   ratio    error")
        package = 0.0
        for variant in variants(lengths):
            if variant.transport != "package" and args.only not in str(variant):
                continue
            if variant not in known:
                error, failure = together(lambda variant=variant: errors(variant, reference))
                known[variant] = failure or f"{error:.1e}"
            found, failure = together(lambda v=variant, n=lengths: measure(n, v, args.repeat, args.profile))
            if failure or not isinstance(found, tuple):
                if first:
                    print(lengths[0], variant, failure, flush=True)
                continue
            forward, both, peak = found
            package = both if variant.transport == "package" else package
            ratio = f"{package / both:7.2f}" if package else "      -"
            line = f"{forward:11.2f} {both:10.2f} {flop / both / 1e9:9.0f} {peak:10.1f} {ratio} {known[variant]:>8}"
            table.append(f"{variant!s:32}{line}")
            if first:
                print(table[-1], flush=True)
            torch.cuda.empty_cache()
    if first:
        print("=" * 100, *table, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
