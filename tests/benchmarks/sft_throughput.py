"""SFT tokens per second and peak memory on one GPU, ours and TRL's, on the same workload in the same run.

    python tests/benchmarks/sft_throughput.py [--trl] [--compile]

A random model of the Qwen2.5-1.5B shape; 4 sequences of 4,096 random tokens a step, one packed micro-batch; fp32
masters, bf16 compute, fused AdamW; mean of the steps after the fourth. TRL needs flash-attn and its own process.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch

SEQUENCES, LENGTH, STEPS, WARM_UP = 4, 4096, 14, 4


def write_model(directory: Path) -> None:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
    )
    with torch.device("cuda"):
        Qwen2ForCausalLM(config).bfloat16().save_pretrained(directory)


def tokens(seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(100, 151_000, (LENGTH,), generator=g).tolist() for _ in range(SEQUENCES)]


def report(name: str, times: list[float]) -> None:
    seconds = (times[-1] - times[WARM_UP - 1]) / (len(times) - WARM_UP)
    peak = torch.cuda.max_memory_allocated() / 2**30
    print(f"{name}: {seconds * 1e3:.0f} ms, {SEQUENCES * LENGTH / seconds:,.0f} tok/s, peak {peak:.1f} GiB", flush=True)


def ours(model: str, checkpointing: str, *, compile: bool = False) -> None:
    import lightning as L

    from rl2lightning import SFT, FSDP2TPStrategy
    from rl2lightning.types import ChatBatch, Sequences

    class Clock(L.Callback):
        times: list[float] = []

        def on_train_batch_end(self, *args: object) -> None:
            torch.cuda.synchronize()
            self.times.append(time.time())

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> torch.utils.data.DataLoader:
            mask = [[False] + [True] * (LENGTH - 1)] * SEQUENCES
            batches = [ChatBatch(Sequences.from_lists(tokens(i), mask), []) for i in range(STEPS)]
            return torch.utils.data.DataLoader(batches, batch_size=None)

        def transfer_batch_to_device(self, batch: ChatBatch, device: torch.device, dataloader_idx: int) -> ChatBatch:
            return batch

    module = SFT(model, max_tokens_per_device=SEQUENCES * LENGTH)
    module.write_model_files = lambda directory: None
    trainer = L.Trainer(
        strategy=FSDP2TPStrategy(activation_checkpointing=checkpointing, compile=compile),
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=STEPS,
        callbacks=[Clock()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=Data())
    report(f"rl2lightning{', compiled' if compile else ''}, checkpointing {checkpointing}", Clock.times)


def trl(model: str, checkpointing: str) -> None:
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    class Clock(TrainerCallback):
        times: list[float] = []

        def on_step_end(self, *args: object, **kwargs: object) -> None:
            torch.cuda.synchronize()
            self.times.append(time.time())

    rows = [{"input_ids": row} for i in range(STEPS) for row in tokens(i)]
    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(),
        model_init_kwargs={"attn_implementation": "flash_attention_2"},
        bf16=True,
        optim="adamw_torch_fused",
        per_device_train_batch_size=SEQUENCES,
        max_length=None,
        padding_free=True,
        max_steps=STEPS,
        gradient_checkpointing=checkpointing == "full",
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = SFTTrainer(model=model, train_dataset=Dataset.from_list(rows), args=settings)
    trainer.add_callback(Clock())
    trainer.train()
    report(f"TRL, checkpointing {checkpointing}", Clock.times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trl", action="store_true", help="run TRL too")
    parser.add_argument("--compile", action="store_true", help="run ours with compiled blocks too")
    parser.add_argument("--only", nargs=3, help=argparse.SUPPRESS)  # library, model, checkpointing: one process each
    args = parser.parse_args()
    if args.only:
        warnings.filterwarnings("ignore")
        library, model, checkpointing = args.only
        if library == "trl":
            trl(model, checkpointing)
        else:
            ours(model, checkpointing, compile=library == "compiled")
        return
    with tempfile.TemporaryDirectory() as directory:
        write_model(Path(directory))
        for checkpointing in ("none", "full"):
            for library in ["ours", *["compiled"] * args.compile, *["trl"] * args.trl]:
                command = [sys.executable, __file__, "--only", library, directory, checkpointing]
                done = subprocess.run(command, capture_output=True, text=True)
                print(done.stdout[-300:] if done.returncode == 0 else done.stderr[-1500:], flush=True)


if __name__ == "__main__":
    main()
