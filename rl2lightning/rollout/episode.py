"""One episode: a generator, read from top to bottom in `Episodes.go_on`. It yields what it wants next, tokens or a call
into user code, and is resumed with the outcome."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from rl2lightning.data.chat import as_messages, encode_prompt, encode_reply, row_tools
from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.environments.event_loop import Abandoner, EventLoop
from rl2lightning.rewards.base import OnRewardError, Reward, Scored, score
from rl2lightning.rollout.engine import derive_seed
from rl2lightning.rollout.partial import Carried, PartialRollouts
from rl2lightning.rollout.scheduler import Call, Generate
from rl2lightning.types import Completion, Message, Row, SamplingParams, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Episode = Generator[Generate | Call, Any, Carried | None]  # which has ended, or was cut off; None: it was dropped

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

    Every job is in exactly one of `trajectories`, `num_dropped`, `num_prompts_too_long` and, of partial rollouts,
    `carried`.
    """

    trajectories: list[Trajectory] = field(default_factory=list)
    carried: list[Carried] = field(default_factory=list)  # whose groups are not complete yet
    reward_errors: Counter[str] = field(default_factory=Counter)  # "reward/cause" -> how often
    environment_errors: Counter[str] = field(default_factory=Counter)  # "reset/exception", "step/…" -> how often
    counts: Counter[str] = field(default_factory=Counter)  # what the environment counted, over all steps
    num_dropped: int = 0  # a reward failed under on_reward_error: drop, or the environment could not begin
    num_prompts_too_long: int = 0  # prompts that leave no room under the engine's max_model_len
    num_truncated: int = 0  # trajectories cut off by max_tokens or max_model_len; they are in `trajectories`
    num_tokens: int = 0  # generated, also by those that were dropped
    seconds: float = 0.0


@dataclass
class Rollout:
    """What the episodes of one rollout share."""

    seed: int
    sampling: SamplingParams
    version: int
    partial: PartialRollouts | None
    result: RolloutResult = field(default_factory=RolloutResult)
    prompts: dict[int, tuple[list[Message], list[int]]] = field(default_factory=dict)  # group -> messages, tokens
    num_ended: int = 0  # episodes whose last turn is over, be they scored yet or not

    def may_be_cut(self, state: Carried) -> bool:
        return self.partial is not None and self.version - state.began < self.partial.max_age

    def budget(self, state: Carried) -> int | None:
        """Most tokens that a trajectory gets in this rollout; None: as many as it likes."""
        return self.partial.tokens if self.partial is not None and self.may_be_cut(state) else None


class Episodes:
    """Plays episodes by one set of rules; see `RolloutLoop` for what they are."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        environment: Environment | None,
        rewards: list[Reward],
        max_turns: int,
        on_reward_error: OnRewardError,
        on_environment_error: Literal["error", "end"],
        apply_chat_template: bool,
    ) -> None:
        self.tokenizer, self.environment, self.rewards, self.max_turns = tokenizer, environment, rewards, max_turns
        self.on_reward_error: OnRewardError = on_reward_error
        self.on_environment_error = on_environment_error
        self.apply_chat_template = apply_chat_template
        self._event_loop, self._threads = EventLoop(), Abandoner()

    def play(self, job: Job, rollout: Rollout) -> Episode:
        """Plays a job from its beginning."""
        if self.environment is None:
            messages = self._reset(job.row)
        else:
            try:
                messages = yield Call(self._reset, job.row)
            except Exception as error:
                self._environment_failed("reset", error, job.row, rollout.result)
                rollout.result.num_dropped += 1
                rollout.num_ended += 1
                return None
        trajectory = self._begin(job, messages, rollout.prompts)
        return (yield from self.go_on(Carried(trajectory, rollout.version), rollout))

    def go_on(self, state: Carried, rollout: Rollout) -> Episode:
        """Plays an episode from where it stands: to its end, or to where it is cut off again."""
        trajectory, result, budget = state.trajectory, rollout.result, rollout.budget(state)
        row = trajectory.row
        for turn in range(trajectory.num_turns, self.max_turns):
            begun = len(state.token_ids)
            completion = yield from self._turn(state, rollout, budget)
            if completion is None:
                return state
            if budget is not None:
                budget -= len(completion.token_ids) - begun
            if not completion.token_ids:
                if turn == 0:
                    result.num_prompts_too_long += 1
                    rollout.num_ended += 1
                    return None
                trajectory.truncated = True  # the context is full
                break
            self._append(state, completion)
            if completion.truncated or turn + 1 == self.max_turns:
                break
            try:
                answer: StepResult = yield Call(self._step, list(trajectory.messages), row)
            except Exception as error:
                self._environment_failed("step", error, row, result)
                break
            before = list(trajectory.messages)
            trajectory.rewards[-1] += answer.reward
            trajectory.messages += answer.messages
            result.counts.update(answer.counts)
            if answer.done or not answer.messages:
                break
            try:
                closing = completion.token_ids[-1] if completion.stop is None else None
                state.reply = self._reply(before, answer.messages, closing)
            except ValueError as error:  # the template refuses it, or it holds our placeholder
                self._environment_failed("reply", error, row, result)
                break
        rollout.num_ended += 1  # already: how long rewards take is not to decide what is cut off
        return (yield from self._score(state, result))

    def _turn(
        self, state: Carried, rollout: Rollout, budget: int | None
    ) -> Generator[Generate, Completion, Completion | None]:
        """The policy's next turn, with what it said of it before; None where it was cut off and `state` holds it.

        Args:
            budget: most tokens it gets; None: as many as the sampling allows.
        """
        t = state.trajectory
        if budget == 0:
            return None
        completion: Completion = yield Generate(
            t.token_ids + state.reply + state.token_ids,
            derive_seed(rollout.seed, t.group_id, t.sample_id, t.num_turns),
            begun=len(state.token_ids),
            max_new_tokens=budget,
            may_be_cut=rollout.may_be_cut(state),
        )
        new = len(completion.token_ids)
        rollout.result.num_tokens += new
        state.token_ids += completion.token_ids
        state.logps += completion.logps
        state.weight_versions += [completion.weight_version] * new
        out_of_budget = completion.finish_reason == "length" and new == budget
        if completion.finish_reason == "abort" or (
            out_of_budget and len(state.token_ids) < rollout.sampling.max_tokens
        ):
            return None
        return replace(completion, token_ids=state.token_ids, logps=state.logps)

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
            weight_versions=[0] * len(ids),
        )

    def _append(self, state: Carried, completion: Completion) -> None:
        """The environment's tokens and the turn that the policy answered with."""
        trajectory, reply, versions = state.trajectory, state.reply, state.weight_versions
        nothing = [0] * len(reply)
        for ids, logps, weight_versions, is_action in (
            (reply, [0.0] * len(reply), nothing, False),
            (completion.token_ids, completion.logps, versions, True),
        ):
            trajectory.token_ids += ids
            trajectory.action_mask += [is_action] * len(ids)
            trajectory.logps += logps
            trajectory.weight_versions += weight_versions
            trajectory.rewards += [0.0] * len(ids)
        if trajectory.num_turns == 0:
            trajectory.weight_version = versions[0]
        trajectory.num_turns += 1
        trajectory.truncated = completion.truncated
        whole = completion.truncated or completion.stop is not None  # otherwise the last is a stop token
        said = completion.token_ids if whole else completion.token_ids[:-1]
        text = self.tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        trajectory.messages.append({"role": "assistant", "content": text})
        state.reply, state.token_ids, state.logps, state.weight_versions = [], [], [], []

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
        return as_messages(self._in_time(functools.partial(self.environment.reset, row)))

    def _step(self, messages: list[Message], row: Row) -> StepResult:
        assert self.environment is not None
        answer = self._in_time(functools.partial(self.environment.step, messages, row))
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

    def _score(self, state: Carried, result: RolloutResult) -> Episode:
        state.ended, trajectory = True, state.trajectory
        if not self.rewards:
            return state
        scored: Scored = yield Call(functools.partial(score, on_error=self.on_reward_error), trajectory, self.rewards)
        for cause in scored.errors.keys() - result.reward_errors.keys():  # one line of each kind; the rest is counted
            _log.warning("%s; counted, and %s", scored.examples[cause], "dropped" if scored.dropped else "0 instead")
        result.reward_errors += scored.errors
        if scored.dropped:
            result.num_dropped += 1
            return None
        trajectory.scores = scored.scores
        return state
