"""Agents with slow tools: how much longer a rollout takes than the longest chain of its tools.

    python tests/benchmarks/agents.py [--engine vllm]

64 agents of 4 turns call a tool that sleeps 0.2 to 1 s after each of the first three; the engine generates 24 tokens a
turn on a small random model. Nothing but waiting: the longest chain is the least it can take. Beside it, the
same without tools (generation alone) and lock-step (every turn waits for all tools of the turn before).
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import torch

from rl2lightning.environments import Environment, StepResult
from rl2lightning.rollout.engine import EngineSpec, RolloutEngine
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutLoop
from rl2lightning.rollout.vllm import VLLMEngine
from rl2lightning.types import Completion, SamplingParams

MODEL = Path(__file__).parents[2] / "configs/quickstart/model"


class FullTurns(RolloutEngine):
    """Turns that reach `max_tokens` count as finished, so that every agent plays all of its turns."""

    def step(self) -> list[Completion]:
        return [replace(completion, finish_reason="stop") for completion in super().step()]  # type: ignore[safe-super]


class FullTurnsHF(FullTurns, HFEngine): ...


class FullTurnsVLLM(FullTurns, VLLMEngine): ...


LIMITS = {"hf": 2.0, "vllm": 1.5}  # of the time over the longest chain


class SlowTool(Environment):
    """Answers after as long as the row says for this turn."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self._lock = threading.Lock()

    def step(self, messages, row):
        turn = sum(message["role"] == "assistant" for message in messages) - 1
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
        time.sleep(row["latencies"][turn])
        with self._lock:
            self.running -= 1
        return StepResult([{"role": "tool", "content": "found 42"}])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=64)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--seconds", type=float, nargs=2, default=(0.2, 1.0))
    parser.add_argument("--engine", choices=list(LIMITS), default="hf")
    settings = parser.parse_args()
    torch.set_num_threads(1)

    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(MODEL))
    kind = FullTurnsHF if settings.engine == "hf" else FullTurnsVLLM
    engine = kind(max_num_seqs=settings.agents)
    stop_token_ids = (tokenizer.eos_token_id,)
    engine.start(EngineSpec(str(MODEL), "cpu", torch.float32, stop_token_ids=stop_token_ids))
    engine.update_weights(((name, p.detach()) for name, p in model.named_parameters()), 0)

    rng = random.Random(0)
    calls = settings.turns - 1  # nothing is asked after the last turn
    rows = [
        {
            "messages": [{"role": "user", "content": f"question {i}"}],
            "latencies": [rng.uniform(*settings.seconds) for _ in range(calls)],
        }
        for i in range(settings.agents)
    ]
    sampling = SamplingParams(max_tokens=settings.tokens, min_tokens=settings.tokens)

    def play(latencies) -> tuple[float, float, int, SlowTool]:
        """Seconds by the clock and of the processor, tokens, and the environment."""
        begin = time.process_time()
        environment = SlowTool()
        loop = RolloutLoop(
            engine, tokenizer, environment=environment, max_turns=settings.turns, tool_workers=settings.agents
        )
        jobs = [Job({**row, "latencies": latencies(row)}, i) for i, row in enumerate(rows)]
        result = loop.run(jobs, sampling, 0)
        turns = sum(trajectory.num_turns for trajectory in result.trajectories)
        assert turns == settings.agents * settings.turns, f"{turns} turns were played"
        return result.seconds, time.process_time() - begin, result.num_tokens, environment

    chains = [sum(row["latencies"]) for row in rows]
    slowest_turns = sum(max(row["latencies"][k] for row in rows) for k in range(calls))
    play(lambda row: [0.0] * calls)  # warms up
    alone, _, num_tokens, _ = play(lambda row: [0.0] * calls)
    seconds, busy, _, environment = play(lambda row: row["latencies"])
    print(
        f"{settings.agents} agents x {settings.turns} turns, {num_tokens} tokens, {sum(chains):.0f} s of tools in all"
    )
    print(f"longest chain of tools      {max(chains):.2f} s")
    print(f"generation without waiting  {alone:.2f} s")
    print(f"lock-step would take        {slowest_turns + alone:.2f} s")
    print(f"measured                    {seconds:.2f} s, {environment.most} tools at a time, {busy:.2f} s of processor")
    print(f"measured / longest chain    {seconds / max(chains):.2f}")
    engine.shutdown()
    sys.exit(seconds > LIMITS[settings.engine] * max(chains))


if __name__ == "__main__":
    main()
