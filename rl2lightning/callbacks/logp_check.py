"""Whether engine and trainer compute the same model: log-probs of a few sampled tokens, compared after a push."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_info

from rl2lightning.callbacks.generation import attempt, gather
from rl2lightning.rollout.engine import RolloutEngine, derive_seed
from rl2lightning.types import Completion, RolloutError, SamplingParams, Sequences, Trajectory

# mean |difference|; agreeing implementations were measured at 1e-6 and 0.02, stale or missing weights from 0.2 on
THRESHOLDS = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.15}
_NUM_PROMPTS, _NUM_TOKENS = 16, 32


def probe(engine: RolloutEngine, trajectories: list[Trajectory]) -> Sequences | None:
    """Continuations of some trajectories' prompts, drawn from the whole distribution; every process calls it.

    Returns:
        those of all engines, on every process; None where there is no prompt.

    Raises:
        RolloutError: an engine failed; on all processes of the run.
    """
    prompts = [t.token_ids[: t.action_mask.index(True)] for t in trajectories if t.num_actions]
    prompts = list(dict.fromkeys(map(tuple, prompts)))[:_NUM_PROMPTS]
    sampling = SamplingParams(max_tokens=_NUM_TOKENS)
    seeds = [derive_seed("probe", i) for i in range(len(prompts))]
    generate = partial(engine.generate, prompts, sampling, seeds)
    everywhere: list[list[Completion]] = gather(*attempt(lambda: engine.together(generate) or []))
    found = [c for part in everywhere for c in part if c.token_ids]
    if not found:
        return None
    return Sequences.from_lists(
        [c.prompt_ids + c.token_ids for c in found],
        [[False] * len(c.prompt_ids) + [True] * len(c.token_ids) for c in found],
        rollout_logps=[[0.0] * len(c.prompt_ids) + c.logps for c in found],
    )


def compare(module: Any, seqs: Sequences, *, threshold: float | None = None) -> float:
    """Mean |difference| of the engine's log-probs and the policy's; every process calls it.

    Raises:
        RolloutError: it is above the threshold; None: that of the compute type.
    """
    dtype = module.strategy.compute_dtype
    threshold = THRESHOLDS[dtype] if threshold is None else threshold
    assert module.policy is not None and seqs.rollout_logps is not None
    gaps = (module.score(module.policy, seqs) - seqs.rollout_logps)[seqs.action_mask].abs()
    gap, name = float(gaps.mean()), str(dtype).removeprefix("torch.")
    if not gap <= threshold:  # NaN is too much
        raise RolloutError(
            f"the engine's log-probs differ from the trainer's by {gap:.3g} on average over {len(gaps)} tokens, and "
            f"{threshold:g} is what {name} may differ by: the engine computes another model, because weights did not "
            "arrive or because it implements this architecture differently. Training on its samples would be "
            "off-policy without saying so; use another engine, or set check_logps of the RolloutCallback to never"
        )
    rank_zero_info(f"engine and trainer agree: log-probs of {len(gaps)} tokens differ by {gap:.2g} on average ({name})")
    return gap
