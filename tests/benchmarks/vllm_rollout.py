"""Rollouts by VLLMEngine on one or several GPUs: seconds, tokens/s, pushes, memory held asleep, log-prob gap.

    python tests/benchmarks/vllm_rollout.py
    torchrun --nproc-per-node 2 tests/benchmarks/vllm_rollout.py --tensor 2
    torchrun --nproc-per-node 2 tests/benchmarks/vllm_rollout.py            # two replicas, each with all the prompts

A random model of the Qwen2.5-1.5B shape in bf16; 32 prompts of 256 tokens, 8 samples each, at most 1,024 tokens, ended
by any of 300 stop tokens (mean length about 430). `--shape 7b` is the Qwen2.5-7B shape. No network is needed.
"""

import argparse
import copy
import os
import tempfile
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

import rl2lightning  # noqa: F401 - before transformers
from rl2lightning.rollout.engine import EngineSpec, derive_seed
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.types import Completion, SamplingParams

VOCABULARY = 151_936
SHAPES = {
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28, "num_attention_heads": 28},
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4},
}
KV_HEADS = {"1.5b": 2, "7b": 4, "tiny": 2}
NUM_PROMPTS, NUM_SAMPLES, PROMPT_LENGTH, MAX_TOKENS, NUM_STOPS = 32, 8, 256, 1024, 300


def model_config(shape: str):
    from transformers import Qwen2Config

    return Qwen2Config(
        vocab_size=VOCABULARY,
        num_key_value_heads=KV_HEADS[shape],
        tie_word_embeddings=shape != "7b",
        max_position_embeddings=4096,
        **SHAPES[shape],
    )


class Clock:
    """Seconds by name, the device idle before and after."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[str, list[float]] = {}

    @contextmanager
    def __call__(self, name: str):
        self._wait()
        begin = time.perf_counter()
        yield
        self._wait()
        self.seconds.setdefault(name, []).append(time.perf_counter() - begin)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def used(device: torch.device) -> float:
    """GiB of the device in use by whomever."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return (total - free) / 2**30


@torch.no_grad()
def logps(model, completions: list[Completion]) -> torch.Tensor:
    """Log-probs of every token by a plain forward pass of each completion."""
    found = []
    for c in completions:
        ids = torch.tensor([c.prompt_ids + c.token_ids], device=model.device)
        logits = model(input_ids=ids).logits[0, len(c.prompt_ids) - 1 : -1].float()
        chosen = torch.tensor(c.token_ids, device=model.device)[:, None]
        found.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
    return torch.cat(found)


def main(args: argparse.Namespace) -> None:
    if "RANK" not in os.environ:
        os.environ |= {
            "RANK": "0",
            "WORLD_SIZE": "1",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
        }
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    from transformers import Qwen2ForCausalLM

    clock, config = Clock(device), model_config(args.shape)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(0, VOCABULARY, (args.prompts, PROMPT_LENGTH), generator=generator).tolist()
    stops = tuple(torch.randperm(VOCABULARY, generator=generator)[:NUM_STOPS].tolist())
    sampling = SamplingParams(max_tokens=args.max_tokens)
    requests = [prompt for prompt in prompts for _ in range(NUM_SAMPLES)]

    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        engine = VLLMEngine(tensor=args.tensor, enforce_eager=args.eager, kv_cache_memory_bytes=args.kv_cache)
        with clock("start"):
            engine.start(
                EngineSpec(directory, device, torch.bfloat16, stops, max_model_len=PROMPT_LENGTH + args.max_tokens)
            )
    awake = used(device)
    with clock("first sleep"):
        engine.sleep()
    asleep = used(device)
    torch.manual_seed(0)  # the same weights on every process
    with device:  # not .bfloat16(), which would round the frequencies of the positions, too
        model = Qwen2ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    trainers = used(device) - asleep

    rows, num_tokens, rounding = [], 0, torch.zeros(())
    for step in range(args.steps):
        with clock("push"):
            engine.update_weights(model.named_parameters(), version=step)
        with clock("wake"):
            engine.wake()
        seeds = [derive_seed(step, i) for i in range(len(requests))]
        with clock("generate"):
            completions = engine.together(lambda: engine.generate(requests, sampling, seeds))  # noqa: B023
        with clock("sleep"):
            engine.sleep()
        if completions is not None:
            num_tokens = sum(len(c.token_ids) for c in completions)
            some = completions[:: max(1, len(completions) // 8)]
            plain = logps(model, some)
            found = (plain - torch.tensor([x for c in some for x in c.logps])).abs()
            rows.append(
                (step, *(clock.seconds[n][-1] for n in ("push", "wake", "generate", "sleep")), num_tokens, found)
            )
            if step == args.steps - 1:  # what bf16 alone does to these log-probs
                rounding = (plain - logps(copy.deepcopy(model).float(), some)).abs().mean()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.01)
    held = used(device) - trainers
    engine.shutdown()
    assert dist.is_initialized(), "the trainer's process group went with the engine"
    dist.barrier(device_ids=[device.index] if on_gpu else None)
    if dist.get_rank() == 0:
        report(args, clock, rows, awake=awake, asleep=asleep, held=held, rounding=float(rounding))
    dist.destroy_process_group()


def report(
    args: argparse.Namespace,
    clock: Clock,
    rows: list,
    *,
    awake: float,
    asleep: float,
    held: float,
    rounding: float,
) -> None:
    from importlib.metadata import version

    packages = ", ".join(f"{p} {version(p)}" for p in ("torch", "transformers"))
    print(
        f"\n{args.shape}, tensor {args.tensor}, {dist.get_world_size()} processes, {packages}; "
        f"start {clock.seconds['start'][0]:.1f} s; GiB in use: awake {awake:.1f}, asleep {asleep:.1f} before and "
        f"{held:.1f} after the rollouts (the trainer's model not counted); mean gap of "
        f"plain bf16 and fp32 forwards {rounding:.3f}\n"
        "| step | push s | wake s | generate s | tok/s | mean length | sleep s | mean gap | max gap |\n"
        "|---|---|---|---|---|---|---|---|---|"
    )
    for step, push, wake, generate, sleep, tokens, gap in rows:
        length = tokens / (args.prompts * NUM_SAMPLES)
        print(
            f"| {step} | {push:.3f} | {wake:.3f} | {generate:.2f} | {tokens / generate:,.0f} | {length:.0f} "
            f"| {sleep:.2f} | {gap.mean():.3f} | {gap.max():.2f} |"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1.5b")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=NUM_PROMPTS)
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS)
    parser.add_argument("--kv-cache", type=int, help="bytes; default: the engine's own")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    main(parser.parse_args())
