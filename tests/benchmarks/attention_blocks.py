"""The attention kernels on one GPU: error against fp32 mathematics, and TFLOP/s forward and backward.

    python tests/benchmarks/attention_blocks.py [--backends fa4 cudnn ...]

A backend that is not installed or cannot serve a shape is left out of it. The last lines are the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import Tensor

from rl2lightning.models.attention import AttentionSpec
from rl2lightning.models.blocks import BlockBackend, Demand, Segments
from rl2lightning.models.blocks_math import Math
from rl2lightning.models.kernels import BACKENDS

HEADS, KEY_HEADS, HEAD_SIZE = 32, 8, 128
DEVICE = torch.device("cuda")
PLAIN = AttentionSpec(HEAD_SIZE**-0.5)
CHECKS = {  # causal, lengths of the queries, lengths of the keys, spec
    "square causal": (True, [300, 512, 1], [300, 512, 1], PLAIN),
    "bottom right": (True, [64, 100], [256, 100], PLAIN),
    "full": (False, [128, 200], [300, 77], PLAIN),
    "one query": (True, [1], [40], PLAIN),
    "window": (True, [64, 300], [256, 300], AttentionSpec(HEAD_SIZE**-0.5, window=50)),
    "softcap": (True, [300, 200], [300, 200], AttentionSpec(HEAD_SIZE**-0.5, softcap=5.0)),
}
SPEEDS = [(True, 8192, 8192), (True, 32768, 32768), (False, 8192, 4096), (False, 32768, 16384)]


def rows(n: int, heads: int) -> Tensor:
    return torch.randn(n, heads, HEAD_SIZE, device=DEVICE, dtype=torch.bfloat16)


def segments(lengths: list[int]) -> Segments:
    return Segments.of(lengths).to(DEVICE)


def milliseconds(f: Callable[[], object], repeat: int = 10) -> float:
    for _ in range(2):
        f()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeat):
        f()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeat * 1e3


def rms_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours.float() - reference.float()).square().mean().sqrt() / reference.float().square().mean().sqrt())


def check(backend: BlockBackend, causal: bool, queries: list[int], keys: list[int], spec: AttentionSpec) -> str:
    """Relative RMS errors of out, dq, dk, dv and the largest of the log-sum-exp."""
    cu_q, cu_k = segments(queries), segments(keys)
    torch.manual_seed(0)
    q, dout = rows(cu_q.total, HEADS), rows(cu_q.total, HEADS)
    k, v = rows(cu_k.total, KEY_HEADS), rows(cu_k.total, KEY_HEADS)
    out, lse = Math().forward(q, k, v, cu_q, cu_k, causal, spec)
    ours, our_lse = backend.forward(q, k, v, cu_q, cu_k, causal, spec)
    # as in a ring: other keys doubled every sum of exponentials
    whole = (0.5 * out).to(q.dtype), lse + torch.tensor(2.0).log().item()
    expected = Math().backward(dout, q, k, v, *whole, cu_q, cu_k, causal, spec)
    grads = backend.backward(dout, q, k, v, *whole, cu_q, cu_k, causal, spec)
    errors = [rms_error(ours, out), *(rms_error(a, b) for a, b in zip(grads, expected, strict=True))]
    return " ".join(f"{e:.1e}" for e in errors) + f"  lse {float((our_lse - lse).abs().max()):.1e}"


def speed(backend: BlockBackend, causal: bool, num_queries: int, num_keys: int) -> tuple[float, float]:
    """Forward and backward in TFLOP/s."""
    cu_q, cu_k = segments([num_queries]), segments([num_keys])
    q, dout = rows(num_queries, HEADS), rows(num_queries, HEADS)
    k, v = rows(num_keys, KEY_HEADS), rows(num_keys, KEY_HEADS)
    out, lse = backend.forward(q, k, v, cu_q, cu_k, causal, PLAIN)
    flop = 4 * num_queries * num_keys * HEADS * HEAD_SIZE * (0.5 if causal else 1)
    forward = milliseconds(lambda: backend.forward(q, k, v, cu_q, cu_k, causal, PLAIN))
    backward = milliseconds(lambda: backend.backward(dout, q, k, v, out, lse, cu_q, cu_k, causal, PLAIN))
    return flop / forward / 1e9, 2.5 * flop / backward / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="*", default=[b.name for b in BACKENDS if b.name != "math"])
    args = parser.parse_args()
    backends = [b for b in BACKENDS if b.name in args.backends]
    print(torch.__version__, "cudnn", torch.backends.cudnn.version(), torch.cuda.get_device_name())
    for name, (causal, queries, keys, spec) in CHECKS.items():
        for backend in backends:
            q = rows(1, HEADS)
            reason = backend.refusal(Demand.of(q, spec, segments(queries), square=queries == keys or not causal))
            try:
                print(f"{name:14} {backend.name:10}", reason or check(backend, causal, queries, keys, spec), flush=True)
            except Exception as error:  # the others are still worth measuring
                print(f"{name:14} {backend.name:10} FAILED {type(error).__name__}: {str(error)[:300]}", flush=True)
    table = [f"{'TFLOP/s forward / backward':28}" + "".join(f"{b.name:>14}" for b in backends)]
    for causal, num_queries, num_keys in SPEEDS:
        line = f"{num_queries} x {num_keys} {'causal' if causal else 'full':8}".ljust(28)
        for backend in backends:
            if backend.refusal(Demand.of(rows(1, HEADS), PLAIN, segments([num_queries]))) is None:
                try:
                    line += f"{'{:.0f} / {:.0f}'.format(*speed(backend, causal, num_queries, num_keys)):>14}"
                except Exception as error:
                    print(f"{backend.name} {num_queries} x {num_keys}: {type(error).__name__}: {str(error)[:300]}")
                    line += f"{'failed':>14}"
            else:
                line += f"{'-':>14}"
        table.append(line)
    print("\n".join(table))


if __name__ == "__main__":
    main()
