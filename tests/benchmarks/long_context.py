"""Training steps on one long sequence: tokens per second and GPU, model FLOP utilisation and peak memory.

    torchrun --nproc-per-node 8 tests/benchmarks/long_context.py --context 8 --tokens 131072

A random model of the Qwen2.5-7B (or 1.5B) shape, fp32 masters, bf16 compute, fused AdamW, one sequence a step; mean of
the steps after the second. MFU counts the forward pass and twice that for the backward, causal attention as half of its
square, and nothing of what checkpointing repeats, against 989 TFLOP/s of dense bf16.
"""

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path

import lightning as L
import torch
import torch.distributed as dist

from rl2lightning import SFT, FSDP2TPStrategy, RingAttention
from rl2lightning.types import ChatBatch, Sequences

PEAK = 989e12
WARM_UP = 2
SHAPES = {
    "7b": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
        "tie_word_embeddings": False,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151_936,
        "tie_word_embeddings": True,
    },
}


def write_model(directory: Path, shape: str) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(**SHAPES[shape], max_position_embeddings=1_048_576)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        Qwen2ForCausalLM(config).save_pretrained(directory)
    torch.set_default_dtype(torch.float32)
    torch.cuda.empty_cache()


def flops(shape: str, tokens: int) -> float:
    """Of one step, forward and backward."""
    s = SHAPES[shape]
    h, kv = s["hidden_size"], s["hidden_size"] // s["num_attention_heads"] * s["num_key_value_heads"]
    layer = h * (2 * h + 2 * kv) + 3 * h * s["intermediate_size"]
    matrices = s["num_hidden_layers"] * layer + h * s["vocab_size"]
    attention = s["num_hidden_layers"] * 4 * h * tokens / 2
    return 3 * tokens * (2 * matrices + attention)


class Data(L.LightningDataModule):
    def __init__(self, tokens: int, steps: int) -> None:
        super().__init__()
        self.tokens, self.steps = tokens, steps

    def train_dataloader(self) -> torch.utils.data.DataLoader:
        rank = self.trainer.strategy.data_rank  # each data rank has a sequence of its own
        batches = []
        for i in range(self.steps):
            g = torch.Generator().manual_seed(1000 * rank + i)
            ids = torch.randint(100, 151_000, (self.tokens,), generator=g).tolist()
            batches.append(ChatBatch(Sequences.from_lists([ids], [[False] + [True] * (self.tokens - 1)]), []))
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def transfer_batch_to_device(self, batch: ChatBatch, device: torch.device, dataloader_idx: int) -> ChatBatch:
        return batch


class Clock(L.Callback):
    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: object) -> None:
        torch.cuda.synchronize()
        self.times.append(time.time())
        if trainer.is_global_zero:
            metrics = trainer.callback_metrics
            norm, loss = float(metrics["train/grad_norm"]), float(metrics["train/loss"])
            print(f"step {trainer.global_step}: loss {loss:.6f} grad norm {norm:.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--context", type=int, default=1)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--replicate", type=int, default=1)
    parser.add_argument("--tensor_sequence", action="store_true")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="selective")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--model", type=Path, help="where to put the model; kept, and used if it is there")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    path = args.model or Path(tempfile.gettempdir()) / f"long-context-{args.shape}"
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    marker = path / "complete"
    if rank == 0 and not marker.exists():
        write_model(path, args.shape)
        marker.touch()
    while not marker.exists():
        time.sleep(1)
    module = SFT(str(path), max_tokens_per_device=-(-args.tokens // args.context))
    module.write_model_files = lambda directory: None  # there is no tokenizer
    clock = Clock()
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(
            replicate=args.replicate,
            context=args.context,
            tensor=args.tensor,
            tensor_sequence=args.tensor_sequence,
            activation_checkpointing=args.checkpointing,
            compile=args.compile,
        ),
        plugins=[RingAttention(transport=args.transport, backend=args.backend)],
        accelerator="gpu",
        devices=world,
        precision="bf16-mixed",
        max_steps=args.steps,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Data(args.tokens, args.steps))
    seconds = (clock.times[-1] - clock.times[WARM_UP - 1]) / (len(clock.times) - WARM_UP)
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30)
    if world > 1:
        peak = trainer.strategy.max_over_processes(peak.cuda()).cpu()
    if rank == 0:
        data = trainer.strategy.data_size
        rate = data * args.tokens / seconds / world
        mfu = data * flops(args.shape, args.tokens) / seconds / world / PEAK
        print(
            f"{args.shape} {args.tokens} tokens, {world} GPUs, context {args.context} tensor {args.tensor} "
            f"{args.checkpointing}{' compiled' if args.compile else ''} {args.transport}/{args.backend}: "
            f"{seconds:.2f} s, {rate:,.0f} tok/s/GPU, MFU {100 * mfu:.1f} %, peak {float(peak):.1f} GiB",
            flush=True,
        )
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
