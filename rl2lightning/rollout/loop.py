"""Plays many trajectories at once through one engine, their environments and rewards in threads.

What a trajectory is made of is in `episode.py`; `Scheduler` runs all of them.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

import torch

from rl2lightning.data.chat import encode_prompt
from rl2lightning.environments.base import Environment
from rl2lightning.rewards.base import OnRewardError, Reward, RewardTransform, WeightedSum
from rl2lightning.rollout.engine import RolloutEngine
from rl2lightning.rollout.episode import Episodes, Job, Rollout, RolloutResult
from rl2lightning.rollout.partial import Carried, PartialRollouts, check_messages, check_rows, whole_groups
from rl2lightning.rollout.scheduler import Scheduler
from rl2lightning.types import Message, Row, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, int], None]  # finished trajectories, all trajectories, tokens generated

_log = logging.getLogger(__name__)


class RolloutLoop:
    """Token-in, token-out episodes of any number of turns.

    The engine's ids and log-probs are kept verbatim; only what the environment says is tokenised. Environment steps and
    rewards run in threads beside the generation of others, so they must be thread-safe, and must come to an end by
    themselves (a thread cannot be stopped) unless the environment sets a `timeout`. `async def` steps run in one event
    loop, `tool_workers` of them at a time.

    Args:
        environment: answers the assistant's turns; None for a single turn on the row's messages.
        rewards: named rewards of the finished trajectory, followed by those the environment brings.
        transform: combines them; None is their weighted sum.
        max_turns: most assistant turns; after the last one the environment is not asked.
        tool_workers: threads for environment and rewards.
        on_reward_error: what a failing reward means, see `rewards.score`.
        on_environment_error: `end` counts an exception in `step`, ends the trajectory there and scores it (in `reset`:
            drops it); `error` stops the run.
        apply_chat_template: False for base models.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        *,
        environment: Environment | None = None,
        rewards: Sequence[Reward] = (),
        transform: RewardTransform | None = None,
        max_turns: int = 1,
        tool_workers: int = 32,
        on_reward_error: OnRewardError = "error",
        on_environment_error: Literal["error", "end"] = "end",
        apply_chat_template: bool = True,
    ) -> None:
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns} must be at least 1")
        if max_turns > 1 and environment is None:
            raise ValueError(f"max_turns={max_turns} needs an environment that answers; set one, or max_turns: 1")
        if tool_workers < 1:
            raise ValueError(f"tool_workers={tool_workers} must be at least 1")
        own = () if environment is None else environment.rewards.items()
        self.rewards = [*rewards, *(_EnvironmentReward(name, function) for name, function in own)]
        counts = Counter(reward.name for reward in self.rewards)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two rewards are named '{twice[0]}'; give one of them another name")
        self.engine, self.tokenizer, self.environment = engine, tokenizer, environment
        self.transform = transform or WeightedSum()
        self.tool_workers = tool_workers
        self._episodes = Episodes(
            tokenizer,
            environment=environment,
            rewards=self.rewards,
            max_turns=max_turns,
            on_reward_error=on_reward_error,
            on_environment_error=on_environment_error,
            apply_chat_template=apply_chat_template,
        )
        if apply_chat_template:
            self._check_template()

    def _check_template(self) -> None:
        """Says so where a chat template drops the tools that it is handed."""
        tools = None if self.environment is None else self.environment.tools
        if not tools:
            return
        ask = functools.partial(encode_prompt, self.tokenizer, [{"role": "user", "content": "?"}])
        try:
            ignored = ask(tools=tools) == ask(tools=None)
        except ValueError:  # a template that needs them, or another kind of conversation
            return
        if ignored:
            _log.warning(
                "the chat template ignores the tools of %s, so the policy is not told of them: describe them in a "
                "system message (ToolEnvironment: describe: system) or in the data",
                type(self.environment).__name__,
            )

    def run(
        self,
        jobs: Sequence[Job],
        sampling: SamplingParams,
        seed: int,
        *,
        partial: PartialRollouts | None = None,
        carried: Sequence[Carried] = (),
        progress: Progress | None = None,
    ) -> RolloutResult:
        """Plays all jobs, to their end or, with `partial`, as far as that lets them.

        Args:
            seed: of this rollout; each turn's own is derived from it, the job's group and sample, and the turn, so a
                trajectory does not depend on the others.
            carried: what an earlier rollout with the same seed left, which is gone on with; it stays as it is.
            progress: called now and then from this thread.

        Raises:
            ValueError: a reward or environment failed under the policy `error`.
            Whatever the engine raises. In any case no request and no thread is left behind.
        """
        begin = time.perf_counter()
        self._check_ends(sampling)
        if partial is not None:
            check_rows(job.row for job in jobs)
        rollout = Rollout(seed, sampling, self.engine.version or 0, partial)
        result = rollout.result
        left = [c.copy() for c in carried if not c.ended]
        new = [self._episodes.play(job, rollout) for job in jobs]
        episodes = [*(self._episodes.go_on(c, rollout) for c in left), *new]

        def tick(finished: int) -> None:
            if progress is not None:
                progress(finished, len(episodes), result.num_tokens)

        def enough() -> bool:
            return partial is not None and partial.enough(rollout.num_ended, len(episodes))

        scheduler = Scheduler(self.engine, sampling, num_workers=self.tool_workers)
        played = [c for c in scheduler.run(episodes, tick, enough) if c is not None]
        result.trajectories = [c.trajectory for c in played]
        if partial is not None or carried:
            waited = [c.copy() for c in carried if c.ended]
            result.trajectories, result.carried = whole_groups([*waited, *played])
            check_messages(result.carried)
        self._combine(result.trajectories)
        result.num_truncated = sum(trajectory.truncated for trajectory in result.trajectories)
        result.seconds = time.perf_counter() - begin
        return result

    def _check_ends(self, sampling: SamplingParams) -> None:
        spec = self.engine.running_on
        if spec is not None and not (spec.stop_token_ids or sampling.stop_token_ids or sampling.stop):
            raise ValueError(
                f"nothing ends a turn: the tokenizer and generation_config.json of '{spec.model_path}' name no "
                "end-of-sequence token, and its chat template closes no turn with one, so every turn would run to "
                "max_tokens; set sampling.stop_token_ids or sampling.stop"
            )

    def _combine(self, trajectories: list[Trajectory]) -> None:
        """One reward for each trajectory: its named rewards combined, on its last action, plus those of its turns."""
        combined = [0.0] * len(trajectories)
        if self.rewards and trajectories:
            scores = {r.name: torch.tensor([t.scores[r.name] for t in trajectories]) for r in self.rewards}
            group_ids = torch.tensor([trajectory.group_id for trajectory in trajectories])
            combined = self.transform(scores, group_ids, {r.name: r.weight for r in self.rewards}).tolist()
        for trajectory, reward in zip(trajectories, combined, strict=True):
            if not math.isfinite(reward):
                raise ValueError(f"{type(self.transform).__name__} made {reward} of the scores {trajectory.scores}")
            trajectory.rewards[-1] += reward  # a trajectory ends with an action
            trajectory.reward = sum(trajectory.rewards)


class _EnvironmentReward(Reward):
    """A reward that the environment brings, as one of the named rewards."""

    def __init__(self, name: str, function: Callable[[list[Message], Row], float]) -> None:
        super().__init__(name=name)
        self._function = function

    def __call__(self, trajectory: Trajectory) -> float:
        return self._function(list(trajectory.messages), trajectory.row)
