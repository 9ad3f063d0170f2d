"""Whole steps of GRPO or PPO, phase by phase: generation, scoring, updates, weight pushes, and the GPU's memory.

    python tests/benchmarks/rl_step.py                                     # GRPO, Qwen2.5-1.5B shape, 32 x 8 x 1,024
    python tests/benchmarks/rl_step.py --algorithm ppo
    python tests/benchmarks/rl_step.py --shape 7b --prompts 64 --max-tokens 2048 --checkpointing full --offload all \\
        --tokens-per-device 32768
    torchrun --nproc-per-node 2 tests/benchmarks/rl_step.py --tensor 2     # the engine over both GPUs
    python tests/benchmarks/rl_step.py --shape tiny --prompts 2 --max-tokens 32   # on a CPU, to see that it runs

A random model; prompts of 256 tokens, completions ended by any of 300 stop tokens (of 151,936; mean length about 430)
or at the cap; the reward is a coin. Through the Trainer, as `rl2lightning fit` runs it. No network is needed.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rl2lightning  # isort: skip - before Lightning and transformers
import lightning as L
import torch
import torch.distributed as dist

from rl2lightning import (
    FSDP2TPStrategy,
    LoRAConfig,
    OptimizerConfig,
    PromptDataModule,
    RolloutCallback,
    SamplingParams,
    Trainer,
)

VOCABULARY, PROMPT_LENGTH, NUM_STOPS = 151_936, 256, 300
COLUMNS = ("step", "generate", "score", "update", "push")
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2},
    "7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_attention_heads": 28, "num_key_value_heads": 4},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1},
}


def write_model(directory: Path, shape: str, *, weights: bool) -> None:
    """Config, a tokenizer without merges (a letter is a token), prompts, and a generation config with many stops."""
    from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    vocabulary = 2048 if shape == "tiny" else VOCABULARY
    config = Qwen2Config(
        vocab_size=vocabulary,
        num_hidden_layers=2 if shape == "tiny" else 28,
        tie_word_embeddings=shape != "7b",
        max_position_embeddings=4096,
        **SHAPES[shape],
    )
    config.save_pretrained(directory)
    if weights:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    letters = {letter: i for i, letter in enumerate(string.ascii_lowercase)}
    rest = {f"<{i}>": i for i in range(len(letters), vocabulary - 1)}
    special = dict.fromkeys(("eos_token", "pad_token", "unk_token"), "<end>")
    tokenizer = Qwen2Tokenizer(vocab=letters | rest | {"<end>": vocabulary - 1}, merges=[], **special)
    tokenizer.save_pretrained(directory)
    stops = random.Random(0).sample(range(len(letters), vocabulary), NUM_STOPS if shape != "tiny" else 8)
    GenerationConfig(eos_token_id=stops, pad_token_id=vocabulary - 1).save_pretrained(directory)
    rng = random.Random(1)
    rows = [
        {"messages": "".join(rng.choices(string.ascii_lowercase, k=PROMPT_LENGTH)), "answer": ""} for _ in range(4096)
    ]
    (directory / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))


class Phases(L.Callback):
    """Seconds of each phase of each step, the device idle before and after.

    And the device's memory in use after the updates, torch's cache included: the most that they took. (What torch says
    it has allocated counts what a sleeping engine gave back.)
    """

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._began = 0.0
        self._phases: dict[str, float] = {}  # of the step in progress
        self._open = 0  # phases within phases belong to the outer one

    def on_fit_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        rollouts = next(c for c in trainer.callbacks if isinstance(c, RolloutCallback))  # type: ignore[attr-defined]
        for owner, method, phase in (
            (rollouts, "push", "push"),
            (rollouts, "collect", "generate"),
            (pl_module, "score", "score"),
            (pl_module, "update", "update"),
        ):
            setattr(owner, method, self._timed(getattr(owner, method), phase))

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = self._now()
            self._open += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._open -= 1
                if not self._open:
                    self._phases[phase] = self._phases.get(phase, 0.0) + self._now() - begin
                if phase == "update" and torch.cuda.is_available():  # before the next push empties torch's cache
                    free, total = torch.cuda.mem_get_info()
                    self._phases["used"] = max((total - free) / 2**30, self._phases.get("used", 0.0))

        return timed

    def _now(self) -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self._began = self._now()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.steps.append(self._phases)
        step, self._phases, now = self._phases, {}, self._now()
        step["step"], self._began = now - self._began, now
        step["tokens"] = pl_module.num_tokens_in_step
        for name in ("rollout/response_length", "train/mismatch_abs", "rollout/truncated"):
            step[name] = float(trainer.callback_metrics.get(name, float("nan")))
        if trainer.is_global_zero:
            print(row(len(self.steps) - 1, step), flush=True)


def coin(messages: list[dict[str, str]]) -> float:
    return float(random.Random(messages[-1]["content"]).random() < 0.5)


def main(args: argparse.Namespace) -> None:
    on_gpu = torch.cuda.is_available()
    common: dict[str, Any] = {
        "random_init": args.lora == "none",
        "optimizer": OptimizerConfig(lr=1e-6, schedule="constant", warmup_ratio=0.0),
        "sampling": SamplingParams(max_tokens=args.max_tokens),
        "samples_per_prompt": args.samples,
        "max_tokens_per_device": args.tokens_per_device,
        "lora": LoRAConfig() if args.lora != "none" else None,
    }
    engine = rl2lightning.VLLMEngine(
        tensor=args.tensor,
        max_model_len=PROMPT_LENGTH + args.max_tokens,
        kv_cache_memory_bytes=args.kv_cache,
        lora="adapter" if args.lora == "adapter" else "merged",
        sleep=args.lora != "adapter",  # which needs the frozen weights in the engine
    )
    phases = Phases()
    rollouts = RolloutCallback(
        engine=engine if on_gpu else rl2lightning.HFEngine(),
        rewards=[coin],
        apply_chat_template=False,
        check_logps=args.check_logps,
    )
    with tempfile.TemporaryDirectory() as own:  # the same files for every process
        directory = Path(own)
        write_model(directory, args.shape, weights=args.lora != "none")
        kind = rl2lightning.PPO if args.algorithm == "ppo" else rl2lightning.GRPO
        trainer = Trainer(
            accelerator="gpu" if on_gpu else "cpu",
            precision="bf16-mixed" if on_gpu else "32-true",
            strategy=FSDP2TPStrategy(
                activation_checkpointing=args.checkpointing, compile=args.compile, offload=args.offload
            ),
            max_steps=args.steps,
            callbacks=[rollouts, phases],  # in this order, so that a step ends when its weights are pushed
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            num_sanity_val_steps=0,
        )
        data = PromptDataModule(
            str(directory / "prompts.jsonl"), prompts_per_rollout=args.prompts, val_ratio=0.0, apply_chat_template=False
        )
        trainer.fit(kind(str(directory), **common), data)
    if trainer.is_global_zero:
        report(args, phases.steps)


def report(args: argparse.Namespace, steps: list[dict[str, float]]) -> None:
    print(f"\n{args.algorithm}, {args.shape}, {args.prompts} x {args.samples} x {args.max_tokens}, {dist_size()}")
    print("| | " + " s | ".join(COLUMNS) + " s | tokens | mean length | log-prob gap | GiB |")
    print("|---" * (len(COLUMNS) + 5) + "|")
    for i, step in enumerate(steps):
        print(row(i, step))


def row(i: int, step: dict[str, float]) -> str:
    seconds = " | ".join(f"{step.get(name, 0.0):.2f}" for name in COLUMNS)
    return (
        f"| {i} | {seconds} | {step['tokens']:,.0f} | {step['rollout/response_length']:.0f} "
        f"| {step['train/mismatch_abs']:.3f} | {step.get('used', 0.0):.1f} |"
    )


def dist_size() -> str:
    return f"{dist.get_world_size() if dist.is_initialized() else 1} processes"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--tensor", type=int, default=1, help="GPUs of one engine")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--tokens-per-device", type=int, default=16_384)
    parser.add_argument("--kv-cache", type=int, help="bytes; default: the engine's own")
    parser.add_argument("--checkpointing", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--offload", choices=["none", "optimizer", "all"], default="none")
    parser.add_argument("--lora", choices=["none", "merged", "adapter"], default="none", help="how it is pushed")
    parser.add_argument("--check-logps", choices=["first", "always", "never"], default="first")
    main(parser.parse_args())
