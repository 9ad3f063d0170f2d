"""Checks on two gloo processes: `torchrun --nproc-per-node 2 vllm_cases.py DIRECTORY`.

The model that is pushed is sharded by FSDP2, so that the stream is one of collectives.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from rl2lightning.callbacks.generation import Generators
from rl2lightning.callbacks.logp_check import probe
from rl2lightning.rollout.engine import EngineSpec
from rl2lightning.rollout.loop import Job, RolloutLoop
from rl2lightning.rollout.partial import Carried, PartialRollouts
from rl2lightning.rollout.vllm import _STEPS_AT_ONCE, VLLMEngine
from rl2lightning.types import Completion, RolloutError, SamplingParams, Trajectory


def logps(model, prompt_ids: list[int], token_ids: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([prompt_ids + token_ids])).logits[0, len(prompt_ids) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(token_ids)[:, None])[:, 0]


def from_all(x) -> list:
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, x)
    return parts


class Toy:
    """As much of a RolloutLoop as `Generators` runs: one trajectory a job, the job's row as prompt."""

    def __init__(self, engine: VLLMEngine) -> None:
        self.loop = RolloutLoop(engine, build_tokenizer())

    def __call__(self, jobs: list[Job], carried: list[Carried], partial: PartialRollouts | None = None):
        return self.loop.run(jobs, SamplingParams(max_tokens=6), seed=0, partial=partial, carried=carried)


def check_numbers(engine: VLLMEngine, sharded, model, *, version: int) -> None:
    """After a push from the shards, what is sampled has the model's log-probs."""
    engine.update_weights(((name, p.full_tensor()) for name, p in sharded.named_parameters()), version)
    prompts = [[10, 20, 30, 40 + i + 10 * (dist.get_rank() // engine.tensor)] for i in range(4)]
    sampling = SamplingParams(max_tokens=20)
    completions = engine.together(lambda: engine.generate(prompts, sampling, range(4)))
    if engine.leads:
        assert completions is not None
        for c in completions:
            assert c.weight_version == version
            torch.testing.assert_close(
                torch.tensor(c.logps), logps(model, c.prompt_ids, c.token_ids), atol=2e-5, rtol=0
            )
    else:
        assert completions is None


def check_abort(engine: VLLMEngine) -> None:
    """Followers stay in step through requests that are cut off, texts that end one, and errors of the leader."""

    steps = 1 if engine.tensor == 1 else _STEPS_AT_ONCE

    def lead() -> list[int]:
        engine.submit("a", [5, 6], SamplingParams(max_tokens=60), seed=1)
        engine.submit("b", [7], SamplingParams(max_tokens=4), seed=2)
        done = [c for _ in range(3) for c in engine.step()]
        (partial,) = engine.abort(["a"])
        assert len(partial.token_ids) == 3 * steps
        engine.submit("a", [5, 6, *partial.token_ids], SamplingParams(max_tokens=3), seed=1)
        while engine.unfinished:
            done += engine.step()
        assert sorted(c.request_id for c in done) == ["a", "b"]
        engine.submit("left over", [5], SamplingParams(max_tokens=30), seed=1)
        engine.step()
        engine.abort(["left over"])
        return [len(done)]

    engine.together(lead)
    assert engine.unfinished == 0

    def fail() -> None:
        engine.submit("x", [5], SamplingParams(max_tokens=30), seed=1)
        engine.step()
        engine.abort(["x"])
        raise KeyError("of the leader's")

    with pytest.raises(KeyError) if engine.leads else nullcontext():
        engine.together(fail)


def check_errors_of_the_leader(engine: VLLMEngine, sharded) -> None:
    """It meets them in the middle of steps that the others make, too, and raises them when these are made."""
    sampling = SamplingParams(max_tokens=20)

    def broken(*_: object):
        raise KeyError("in the leader's part of a step")

    engine._take = broken  # type: ignore[method-assign]
    with pytest.raises(KeyError) if engine.leads else nullcontext():
        engine.together(lambda: engine.generate([[5, 6]], sampling, [0]))
    del engine._take
    assert engine.unfinished == 0

    nowhere = ((name, p.full_tensor() * float("nan")) for name, p in sharded.named_parameters())
    engine.update_weights(nowhere, version=8)
    with pytest.raises(RuntimeError, match="non-finite") if engine.leads else nullcontext():
        engine.together(lambda: engine.generate([[5, 6]], sampling, [0]))
    assert engine.unfinished == 0


def check_errors_of_all(engine: VLLMEngine) -> None:
    """What vLLM refuses on every process is raised on every process, and nobody waits for news of it."""
    with pytest.raises(Exception, match="99999"):
        engine.together(lambda: engine.generate([[5, 6]], SamplingParams(stop_token_ids=(99_999,)), [0]))
    assert engine.unfinished == 0


def check_a_tight_cache(model, directory: str) -> None:
    """Texts end several requests at once and their blocks are given away: the same ones on all processes."""
    engine = VLLMEngine(tensor=2, kv_cache_memory_bytes=1 << 20, max_num_seqs=8, options={"block_size": 32})
    tokenizer = build_tokenizer()
    engine.start(EngineSpec(directory, "cpu", torch.float32, stop_token_ids=(2,), tokenizer=tokenizer))
    engine.update_weights(model.named_parameters(), version=0)
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, 90, (24, 70), generator=generator).tolist()
    sampling = SamplingParams(max_tokens=40, stop=tuple("aeiou0123"))

    def lead() -> list[Completion]:
        """Conversations of several turns, whose next prompt is all that was said."""
        done: list[Completion] = []
        for i, prompt in enumerate(prompts):
            engine.submit(f"{i} 0", prompt, sampling, seed=i)
        while engine.unfinished:
            for c in engine.step():
                done.append(c)
                i, turn = map(int, c.request_id.split())
                if turn < 4:
                    engine.submit(f"{i} {turn + 1}", [*c.prompt_ids, *c.token_ids, 7], sampling, seed=100 * turn + i)
        return done

    for c in engine.together(lead) or []:
        expected = logps(model, c.prompt_ids, c.token_ids)
        torch.testing.assert_close(torch.tensor(c.logps), expected, atol=2e-5, rtol=0)
    engine.shutdown()


def check_jobs(engine: VLLMEngine, *, replica_size: int) -> list[tuple[int, int, list[int]]]:
    """Jobs dealt to engines and their results dealt back; what every process holds at the end, in order."""
    generators = Generators(engine, replica_size)
    replica = dist.get_rank() // replica_size
    rows = [{"messages": [{"role": "user", "content": "abc"[: i % 3 + 1] * (i + 1)}]} for i in range(6)]
    per_replica = 6 * replica_size // dist.get_world_size()
    mine = range(replica * per_replica, (replica + 1) * per_replica)
    jobs = [Job(rows[i], group_id=i, sample_id=k) for i in mine for k in range(2)]
    result = generators.play(jobs, Toy(engine))
    assert [(t.group_id, t.sample_id) for t in result.trajectories] == [(j.group_id, j.sample_id) for j in jobs]
    tokens = [sum(t.num_actions for t in result.trajectories), result.num_tokens]
    per_process = from_all(tokens)[::replica_size]
    assert sum(a for a, _ in per_process) == sum(b for _, b in per_process)  # counted once

    def broken(share: list[Job], carried: list[Carried]):
        raise OSError("out of order")

    with pytest.raises(RolloutError, match="OSError: out of order"):  # on all processes
        generators.play(jobs, broken if dist.get_rank() == 0 else Toy(engine))
    generators.close()
    return [(t.group_id, t.sample_id, t.token_ids) for t in result.trajectories]


def check_carried(engine: VLLMEngine, *, replica_size: int) -> None:
    """What was cut off is known to all, dealt to the engines, and comes to its end once over all of them."""
    generators, toy = Generators(engine, replica_size), Toy(engine)
    rows = [{"messages": [{"role": "user", "content": "abcd"[i]}]} for i in range(4)]
    mine = torch.arange(4).tensor_split(dist.get_world_size() // replica_size)[dist.get_rank() // replica_size].tolist()
    jobs = [Job(rows[i], group_id=i, sample_id=k) for i in mine for k in range(2)]
    partial = PartialRollouts(tokens=4, max_age=9)
    first = generators.play(jobs, lambda share, ours: toy(share, ours, partial))
    assert all(carried == first.carried for carried in from_all(first.carried))
    assert first.carried
    second = generators.play([], toy, first.carried)
    assert not second.carried
    played = [(t.group_id, t.sample_id) for t in (*first.trajectories, *second.trajectories)]
    everywhere = [key for part in from_all(played)[::replica_size] for key in part]
    assert sorted(everywhere) == [(i, k) for i in range(4) for k in range(2)]
    generators.close()


def check_all(tensor: int, directory: str) -> None:
    """All of it with engines of so many processes; at the end they are gone, and the trainer's group is not."""
    rank = dist.get_rank()
    model = build_model()
    sharded, mesh = deepcopy(model).requires_grad_(True), init_device_mesh("cpu", (2,))
    for block in sharded.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    engine = VLLMEngine(tensor=tensor, kv_cache_memory_bytes=16 << 20)
    engine.start(EngineSpec(directory, "cpu", torch.float32, stop_token_ids=(2,)))
    assert engine.leads == (tensor == 1 or rank == 0)
    for version in range(3):
        check_numbers(engine, sharded, model, version=version)
        with torch.no_grad():
            for (_, p), (_, q) in zip(sharded.named_parameters(), model.named_parameters(), strict=True):
                change = torch.randn(q.shape, generator=torch.Generator().manual_seed(q.numel())) * 0.05
                q.add_(change)
                p.add_(distribute_tensor(change, p.device_mesh, p.placements))  # type: ignore[attr-defined]
    check_abort(engine)
    check_errors_of_the_leader(engine, sharded)
    check_errors_of_all(engine)
    check_numbers(engine, sharded, model, version=9)

    # whether the two are two replicas or one, the same trajectories come out
    everyone = from_all(check_jobs(engine, replica_size=1))
    both = from_all(check_jobs(engine, replica_size=2))
    assert both[0] == both[1] == everyone[0] + everyone[1]
    check_carried(engine, replica_size=1)
    check_carried(engine, replica_size=2)

    seqs = probe(engine, [Trajectory({}, 0, token_ids=[5, 6, 7], action_mask=[False, False, True])])
    assert seqs is not None
    assert len(seqs) == 2 // tensor

    loss = sharded(input_ids=torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss
    loss.backward()  # the trainer's collectives work beside the engine's
    engine.shutdown()
    ones = torch.ones(1)
    dist.all_reduce(ones)  # and after it
    assert ones.item() == 2


def main(directory: Path) -> None:
    dist.init_process_group("gloo")
    path = directory / f"model{dist.get_rank()}"
    build_model().config.save_pretrained(path)
    for tensor in (1, 2):
        check_all(tensor, str(path))
    check_a_tight_cache(build_model(), str(path))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    from conftest import build_model, build_tokenizer

    main(Path(sys.argv[1]))
