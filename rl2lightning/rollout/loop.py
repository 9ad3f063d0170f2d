"""Plays episodes: many trajectories at once through one engine, their environments and rewards in threads.

An episode is a generator, read from top to bottom in `RolloutLoop._episode`: it yields what it wants next, tokens or a
call into user code, and is resumed with the outcome. `Scheduler` runs all of them.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from rl2lightning.data.chat import as_messages, encode_prompt, encode_reply, row_tools
from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.environments.event_loop import Abandoner, EventLoop
from rl2lightning.rewards.base import OnRewardError, Reward, RewardTransform, Scored, WeightedSum, score
from rl2lightning.rollout.engine import RolloutEngine, derive_seed
from rl2lightning.rollout.scheduler import Call, Generate, Scheduler
from rl2lightning.types import Completion, Message, Row, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int, int], None]  # finished trajectories, all trajectories, tokens generated
Episode = Generator[Generate | Call, Any, Trajectory | None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One trajectory to play. Samples of one prompt share a group; (group_id, sample_id) decides the random numbers."""

    row: Row
    group_id: int
    sample_id: int = 0


@dataclass
class RolloutResult:
    """Trajectories in the order of their jobs, and a count of all that is not in them.

    Every job is in exactly one of `trajectories`, `num_dropped` and `num_prompts_too_long`.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    reward_errors: Counter[str] = field(default_factory=Counter)  # "reward/cause" -> how often
    environment_errors: Counter[str] = field(default_factory=Counter)  # "reset/exception", "step/…" -> how often
    counts: Counter[str] = field(default_factory=Counter)  # what the environment counted, over all steps
    num_dropped: int = 0  # a reward failed under on_reward_error: drop, or the environment could not begin
    num_prompts_too_long: int = 0  # prompts that leave no room under the engine's max_model_len
    num_truncated: int = 0  # trajectories cut off by max_tokens or max_model_len; they are in `trajectories`
    num_tokens: int = 0  # generated, also by those that were dropped
    seconds: float = 0.0


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
        self.max_turns, self.tool_workers = max_turns, tool_workers
        self.on_reward_error: OnRewardError = on_reward_error
        self.on_environment_error = on_environment_error
        self.apply_chat_template = apply_chat_template
        self._event_loop, self._threads = EventLoop(), Abandoner()
        self._check_template()

    def _check_template(self) -> None:
        """Says so where a chat template drops the tools that it is handed."""
        tools = None if self.environment is None else self.environment.tools
        if not tools or not self.apply_chat_template:
            return
        ask = partial(encode_prompt, self.tokenizer, [{"role": "user", "content": "?"}])
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
        self, jobs: Sequence[Job], sampling: SamplingParams, seed: int, *, progress: Progress | None = None
    ) -> RolloutResult:
        """Plays all jobs.

        Args:
            seed: of this rollout; each turn's own is derived from it, the job's group and sample, and the turn, so a
                trajectory does not depend on the others.
            progress: called now and then from this thread.

        Raises:
            ValueError: a reward or environment failed under the policy `error`.
            Whatever the engine raises. In any case no request and no thread is left behind.
        """
        begin = time.perf_counter()
        result = RolloutResult()
        prompts: dict[int, tuple[list[Message], list[int]]] = {}
        episodes = [self._episode(job, seed, prompts, result) for job in jobs]

        def tick(finished: int) -> None:
            if progress is not None:
                progress(finished, len(jobs), result.num_tokens)

        scheduler = Scheduler(self.engine, sampling, num_workers=self.tool_workers)
        result.trajectories = [t for t in scheduler.run(episodes, tick) if t is not None]
        self._combine(result.trajectories)
        result.num_truncated = sum(trajectory.truncated for trajectory in result.trajectories)
        result.seconds = time.perf_counter() - begin
        return result

    # -- one episode ----------------------------------------------------------------------------------------------

    def _episode(
        self, job: Job, seed: int, prompts: dict[int, tuple[list[Message], list[int]]], result: RolloutResult
    ) -> Episode:
        """The trajectory of a job, or None if it was dropped (and counted in `result`)."""
        if self.environment is None:
            messages = self._reset(job.row)
        else:
            try:
                messages = yield Call(self._reset, job.row)
            except Exception as error:
                self._environment_failed("reset", error, job.row, result)
                result.num_dropped += 1
                return None
        trajectory = self._begin(job, messages, prompts)
        reply: list[int] = []  # what the environment said last: part of the trajectory once the policy answers it
        for turn in range(self.max_turns):
            turn_seed = derive_seed(seed, job.group_id, job.sample_id, turn)
            completion: Completion = yield Generate(trajectory.token_ids + reply, turn_seed)
            result.num_tokens += len(completion.token_ids)
            if not completion.token_ids:
                if turn == 0:
                    result.num_prompts_too_long += 1
                    return None
                trajectory.truncated = True  # the context is full
                break
            self._append(trajectory, reply, completion)
            if completion.truncated or turn + 1 == self.max_turns:
                break
            try:
                answer: StepResult = yield Call(self._step, list(trajectory.messages), job.row)
            except Exception as error:
                self._environment_failed("step", error, job.row, result)
                break
            before = list(trajectory.messages)
            trajectory.rewards[-1] += answer.reward
            trajectory.messages += answer.messages
            result.counts.update(answer.counts)
            if answer.done or not answer.messages:
                break
            try:
                closing = completion.token_ids[-1] if completion.stop is None else None
                reply = self._reply(before, answer.messages, closing)
            except ValueError as error:  # the template refuses it, or it holds our placeholder
                self._environment_failed("reply", error, job.row, result)
                break
        return (yield from self._score(trajectory, result))

    def _begin(
        self, job: Job, messages: list[Message], prompts: dict[int, tuple[list[Message], list[int]]]
    ) -> Trajectory:
        if job.group_id not in prompts or prompts[job.group_id][0] != messages:
            tools = row_tools(job.row) if self.environment is None else self.environment.tools
            ids = encode_prompt(self.tokenizer, messages, tools=tools, apply_chat_template=self.apply_chat_template)
            prompts[job.group_id] = ([dict(message) for message in messages], ids)
        ids = prompts[job.group_id][1]
        return Trajectory(
            row=job.row,
            group_id=job.group_id,
            sample_id=job.sample_id,
            messages=messages,
            token_ids=list(ids),
            action_mask=[False] * len(ids),
            logps=[0.0] * len(ids),
            rewards=[0.0] * len(ids),
        )

    def _append(self, trajectory: Trajectory, reply: list[int], completion: Completion) -> None:
        """The environment's tokens and the turn that the policy answered with."""
        for ids, logps, is_action in (
            (reply, [0.0] * len(reply), False),
            (completion.token_ids, completion.logps, True),
        ):
            trajectory.token_ids += ids
            trajectory.action_mask += [is_action] * len(ids)
            trajectory.logps += logps
            trajectory.rewards += [0.0] * len(ids)
        if trajectory.num_turns == 0:
            trajectory.weight_version = completion.weight_version
        trajectory.num_turns += 1
        trajectory.truncated = completion.truncated
        whole = completion.truncated or completion.stop is not None  # otherwise the last is a stop token
        said = completion.token_ids if whole else completion.token_ids[:-1]
        text = self.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        trajectory.messages.append({"role": "assistant", "content": text})

    def _reply(self, messages: list[Message], new: list[Message], stop_token_id: int | None) -> list[int]:
        assert self.environment is not None
        return encode_reply(
            self.tokenizer,
            messages,
            new,
            stop_token_id=stop_token_id,
            tools=self.environment.tools,
            apply_chat_template=self.apply_chat_template,
        )

    def _reset(self, row: Row) -> list[Message]:
        if self.environment is None:
            return as_messages(row["messages"])
        return as_messages(self._in_time(partial(self.environment.reset, row)))

    def _step(self, messages: list[Message], row: Row) -> StepResult:
        assert self.environment is not None
        answer = self._in_time(partial(self.environment.step, messages, row))
        if not isinstance(answer, StepResult):
            raise TypeError(f"step must return a StepResult, got {type(answer).__name__}")
        if not math.isfinite(answer.reward):
            raise ValueError(f"step returned the reward {answer.reward}")
        new = as_messages(answer.messages) if answer.messages else []
        return StepResult(new, float(answer.reward), answer.done, dict(answer.counts))

    def _in_time(self, call: Callable[[], Any]) -> Any:
        """What a method of the environment returns, awaited where it is a coroutine."""
        assert self.environment is not None
        timeout = self.environment.timeout
        value = call() if timeout is None else self._threads.run(call, timeout, "environment")
        return self._event_loop.run(value, timeout) if inspect.iscoroutine(value) else value

    def _environment_failed(self, where: str, error: Exception, row: Row, result: RolloutResult) -> None:
        what = f"{type(self.environment).__name__}.{where} raised {type(error).__name__}: {error}"
        if self.on_environment_error == "error":
            raise ValueError(f"{what} on row {str(row)[:300]}; mend it, or set on_environment_error: end") from error
        cause = f"{where}/{type(error).__name__}"
        if cause not in result.environment_errors:  # one trace of each kind; the rest is counted
            _log.warning("%s; counted, and its trajectory ended", what, exc_info=error)
        result.environment_errors[cause] += 1

    # -- rewards --------------------------------------------------------------------------------------------------

    def _score(self, trajectory: Trajectory, result: RolloutResult) -> Episode:
        if not self.rewards:
            return trajectory
        scored: Scored = yield Call(partial(score, on_error=self.on_reward_error), trajectory, self.rewards)
        result.reward_errors += scored.errors
        if scored.dropped:
            result.num_dropped += 1
            return None
        trajectory.scores = scored.scores
        return trajectory

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
