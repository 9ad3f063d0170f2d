from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import Tensor

from rl2lightning.environments.base import Environment, StepResult
from rl2lightning.environments.tools import ToolEnvironment
from rl2lightning.rewards.base import FunctionReward, Reward, RewardTransform
from rl2lightning.rollout import scheduler
from rl2lightning.rollout.engine import EngineSpec, RolloutEngine, derive_seed
from rl2lightning.rollout.hf import HFEngine
from rl2lightning.rollout.loop import Job, RolloutLoop
from rl2lightning.types import Completion, SamplingParams, Trajectory

END = 2  # <|im_end|>


class ScriptedEngine(RolloutEngine):
    """Answers by a function of the prompt's text; records what it was sent. One request finishes a step, last first."""

    def __init__(self, tokenizer, answer: Callable[[str], str], *, fail_after: int | None = None) -> None:
        self.tokenizer, self.answer, self.fail_after = tokenizer, answer, fail_after
        self.sent: list[tuple[list[int], int]] = []
        self.running: list[Completion] = []
        self.version = 5

    def submit(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingParams, *, seed: int, begun: int = 0
    ) -> None:
        self.sent.append((list(prompt_ids), seed))
        said = self.answer(self.tokenizer.decode(prompt_ids))
        ids = self.tokenizer.encode(said)
        logps = [-0.5 - 0.25 * i for i in range(len(ids))]
        reason = "stop" if said.endswith(("<|im_end|>", "!")) else "length"
        self.running.append(Completion(request_id, list(prompt_ids), ids, logps, reason, 5))

    @property
    def unfinished(self) -> int:
        return len(self.running)

    def step(self) -> list[Completion]:
        if self.fail_after is not None and len(self.sent) > self.fail_after:
            raise OSError("the device fell off the bus")
        return [self.running.pop()] if self.running else []

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        ids = set(request_ids)
        gone = [c for c in self.running if c.request_id in ids]
        self.running = [c for c in self.running if c.request_id not in ids]
        return gone

    def start(self, spec: EngineSpec) -> None: ...
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def shutdown(self) -> None: ...


class Counting(Environment):
    """Says how many assistant turns it has seen; ends the episode after `turns` of them."""

    def __init__(self, turns: int = 100, reward: float = 0.0) -> None:
        self.turns, self.reward, self.steps = turns, reward, 0

    def step(self, messages, row):
        self.steps += 1
        seen = sum(m["role"] == "assistant" for m in messages)
        if seen >= self.turns:
            return StepResult(done=True, reward=self.reward)
        return StepResult([{"role": "tool", "content": f"seen {seen}"}], reward=self.reward)


class Constant(Reward):
    def __init__(self, value, name: str = "constant", weight: float = 1.0) -> None:
        super().__init__(name=name, weight=weight)
        self.value = value

    def __call__(self, trajectory: Trajectory) -> float:
        return self.value


def ask(text: str, group_id: int = 0, sample_id: int = 0, **columns) -> Job:
    return Job({"messages": [{"role": "user", "content": text}], **columns}, group_id, sample_id)


def echo(prompt: str) -> str:
    return prompt.split("user\n")[1].split("<|im_end|>")[0] + "<|im_end|>"


def no_threads_left() -> bool:
    return not any(thread.name.startswith("rollout") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _leaves_no_thread_behind():
    yield
    assert no_threads_left()


# -- tokens -------------------------------------------------------------------------------------------------------


def test_two_turns_keep_the_engines_tokens_and_tokenise_only_what_the_environment_says(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "yes<|im_end|>" if "seen" in prompt else "go<|im_end|>")
    environment = Counting()
    loop = RolloutLoop(engine, tokenizer, environment=environment, max_turns=2)
    (t,) = loop.run([ask("hi", group_id=4, sample_id=1)], SamplingParams(), 9).trajectories
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    reply = "\n<|im_start|>tool\nseen 1<|im_end|>\n<|im_start|>assistant\n"
    parts = [(prompt, False), ("go<|im_end|>", True), (reply, False), ("yes<|im_end|>", True)]
    assert t.token_ids == tokenizer.encode("".join(text for text, _ in parts))
    assert t.action_mask == [is_action for text, is_action in parts for _ in tokenizer.encode(text)]
    go, yes = [-0.5, -0.75, -1.0], [-0.5, -0.75, -1.0, -1.25]
    n, m = len(tokenizer.encode(prompt)), len(tokenizer.encode(reply))
    assert t.logps == [0.0] * n + go + [0.0] * m + yes
    assert [m["content"] for m in t.messages] == ["hi", "go", "seen 1", "yes"]
    assert (t.num_turns, t.truncated, t.weight_version, t.group_id, t.sample_id) == (2, False, 5, 4, 1)
    # the second request is the first one, its answer and the reply, token for token; each turn has its own seed
    assert engine.sent == [
        (t.token_ids[:n], derive_seed(9, 4, 1, 0)),
        (t.token_ids[: n + 3 + m], derive_seed(9, 4, 1, 1)),
    ]
    assert environment.steps == 1  # not after the last turn


def test_a_tool_trajectory_of_a_real_engine_has_the_logps_of_one_plain_forward(tokenizer, model, model_path):
    engine = HFEngine(max_num_seqs=5)
    engine.start(EngineSpec(str(model_path), "cpu", torch.float32, stop_token_ids=(END,)))
    engine.update_weights(model.named_parameters(), version=0)
    sampling = SamplingParams(max_tokens=8, temperature=0.8, stop_token_ids=tuple(range(60, 98)))
    loop = RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=3)
    jobs = [ask("hello"[: 1 + i % 5], group_id=i, sample_id=k) for i in range(4) for k in range(2)]
    trajectories = loop.run(jobs, sampling, 0).trajectories
    assert {t.num_turns for t in trajectories} >= {3}
    for t in trajectories:
        ids = torch.tensor([t.token_ids])
        with torch.no_grad():
            logps = (model(input_ids=ids).logits[0, :-1] / 0.8).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(t.action_mask)
        torch.testing.assert_close(torch.tensor(t.logps)[mask], logps[mask[1:]], atol=1e-5, rtol=0)
        assert torch.tensor(t.logps)[~mask].eq(0).all()
        assert t.action_mask[-1]
    alone = loop.run([jobs[5]], sampling, 0).trajectories[0]
    assert alone.token_ids == trajectories[5].token_ids
    backwards = loop.run(jobs[::-1], sampling, 0).trajectories[::-1]
    assert [t.token_ids for t in backwards] == [t.token_ids for t in trajectories]
    other = loop.run(jobs, sampling, 1).trajectories
    assert [t.token_ids for t in other] != [t.token_ids for t in trajectories]


def test_trajectories_come_in_the_order_of_their_jobs(tokenizer):
    engine = ScriptedEngine(tokenizer, echo)
    result = RolloutLoop(engine, tokenizer).run([ask(x) for x in "abcdef"], SamplingParams(), 0)
    assert [t.messages[-1]["content"] for t in result.trajectories] == list("abcdef")
    assert result.num_tokens == 12


def test_a_truncated_turn_ends_the_trajectory_without_an_end_token(tokenizer):
    environment = Counting()
    engine = ScriptedEngine(tokenizer, lambda prompt: "endless")
    loop = RolloutLoop(engine, tokenizer, environment=environment, max_turns=5, rewards=[Constant(1.0)])
    result = loop.run([ask("hi")], SamplingParams(), 0)
    (t,) = result.trajectories
    assert t.token_ids[-7:] == tokenizer.encode("endless")
    assert (t.truncated, t.num_turns, t.reward, result.num_truncated, environment.steps) == (True, 1, 1.0, 1, 0)
    assert t.messages[-1]["content"] == "endless"


def test_a_stop_token_that_is_no_special_one_is_a_token_but_not_said(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "halt!")
    (t,) = RolloutLoop(engine, tokenizer).run([ask("hi")], SamplingParams(), 0).trajectories
    assert t.token_ids[-5:] == tokenizer.encode("halt!")
    assert t.messages[-1]["content"] == "halt"


def test_a_text_that_ends_a_turn_is_said_and_the_template_closes_the_turn(tokenizer):
    class StopsAtText(ScriptedEngine):
        def submit(self, request_id, prompt_ids, sampling, *, seed, begun=0) -> None:
            super().submit(request_id, prompt_ids, sampling, seed=seed)
            self.running[-1].stop = "!"

    engine = StopsAtText(tokenizer, lambda prompt: "look!")
    (t,) = (
        RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=2)
        .run([ask("hi")], SamplingParams(), 0)
        .trajectories
    )
    reply = "<|im_end|>\n<|im_start|>tool\nseen 1<|im_end|>\n<|im_start|>assistant\n"
    assert t.token_ids[-10 - len(tokenizer.encode(reply)) :] == tokenizer.encode(f"look!{reply}look!")
    assert [m["content"] for m in t.messages] == ["hi", "look!", "seen 1", "look!"]


def test_base_models_get_bare_text(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=2, apply_chat_template=False)
    (t,) = loop.run([ask("hi")], SamplingParams(), 0).trajectories
    assert tokenizer.decode(t.token_ids) == "hix<|im_end|>seen 1x<|im_end|>"


def test_a_prompt_without_room_is_left_out_and_counted(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "" if "long" in prompt else "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, rewards=[Constant(1.0)])
    result = loop.run([ask("a"), ask("long"), ask("b")], SamplingParams(), 0)
    assert [t.messages[0]["content"] for t in result.trajectories] == ["a", "b"]
    assert (result.num_prompts_too_long, result.num_dropped) == (1, 0)


def test_a_full_context_ends_a_later_turn_and_leaves_the_reply_out(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "" if "seen" in prompt else "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=3, rewards=[Constant(1.0)])
    (t,) = loop.run([ask("a")], SamplingParams(), 0).trajectories
    assert t.token_ids[-2:] == tokenizer.encode("x<|im_end|>")
    assert (t.truncated, t.num_turns, t.rewards[-1]) == (True, 1, 1.0)


def test_rows_are_not_changed(tokenizer):
    job = ask("hi")
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=2).run([job], SamplingParams(), 0)
    assert job.row == {"messages": [{"role": "user", "content": "hi"}]}


# -- environments -------------------------------------------------------------------------------------------------


def test_an_environment_that_never_ends_stops_at_max_turns(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=4)
    (t,) = loop.run([ask("hi")], SamplingParams(), 0).trajectories
    assert (t.num_turns, t.truncated) == (4, False)


def test_an_environment_ends_the_episode_and_its_last_words_are_no_tokens(tokenizer):
    class Parting(Environment):
        def step(self, messages, row):
            return StepResult([{"role": "tool", "content": "bye"}], done=True)

    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    (t,) = (
        RolloutLoop(engine, tokenizer, environment=Parting(), max_turns=4)
        .run([ask("hi")], SamplingParams(), 0)
        .trajectories
    )
    assert (t.num_turns, t.messages[-1]["content"], t.action_mask[-1]) == (1, "bye", True)


def test_turn_rewards_lie_on_the_turns_and_the_named_reward_on_the_last_action(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "xy<|im_end|>")
    environment = Counting(turns=3, reward=0.25)
    rewards = [Constant(1.0, "a", weight=2.0), Constant(0.5, "b")]
    loop = RolloutLoop(engine, tokenizer, environment=environment, max_turns=9, rewards=rewards)
    (t,) = loop.run([ask("hi")], SamplingParams(), 0).trajectories
    ends = [i for i, (a, b) in enumerate(zip(t.action_mask, [*t.action_mask[1:], False], strict=True)) if a and not b]
    assert [t.rewards[i] for i in ends] == [0.25, 0.25, 0.25 + 2.5]
    assert sum(map(abs, t.rewards)) == t.reward == 3.25
    assert t.scores == {"a": 1.0, "b": 0.5}


def test_reset_gives_the_first_messages_and_tools_reach_the_template(tokenizer):
    class Greeting(Environment):
        tools = [{"type": "function", "function": {"name": "f"}}]

        def reset(self, row):
            return [{"role": "user", "content": row["who"]}]

        def step(self, messages, row):
            raise AssertionError("not after the last turn")

    with_tools = tokenizer.chat_template
    tokenizer.chat_template = "{{ tools[0].function.name }}|" + with_tools
    try:
        engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
        (t,) = (
            RolloutLoop(engine, tokenizer, environment=Greeting())
            .run([Job({"who": "Ada"}, 0)], SamplingParams(), 0)
            .trajectories
        )
    finally:
        tokenizer.chat_template = with_tools
    assert tokenizer.decode(t.token_ids).startswith("f|<|im_start|>user\nAda<|im_end|>")


class Slow(Environment):
    """Begins the sooner, the later a row is."""

    def __init__(self, pause: float) -> None:
        self.pause = pause

    def reset(self, row):
        time.sleep(self.pause * (5 - int(row["messages"][0]["content"])))
        return row["messages"]

    def step(self, messages, row):
        return StepResult(done=True)


def test_the_engine_gets_first_requests_together_and_in_order_however_long_their_threads_took(tokenizer):
    engine = ScriptedEngine(tokenizer, echo)
    jobs = [ask(str(i), i) for i in range(6)]
    RolloutLoop(engine, tokenizer, environment=Slow(0.02)).run(jobs, SamplingParams(), 0)
    assert [echo(tokenizer.decode(prompt))[0] for prompt, _ in engine.sent] == list("012345")


def test_the_engine_does_not_wait_for_first_calls_that_take_long(tokenizer, monkeypatch):
    monkeypatch.setattr(scheduler, "_PATIENCE", 0.1)
    engine = ScriptedEngine(tokenizer, echo)
    jobs = [ask(str(i), i) for i in (0, 5)]
    result = RolloutLoop(engine, tokenizer, environment=Slow(0.1)).run(jobs, SamplingParams(), 0)
    assert [echo(tokenizer.decode(prompt))[0] for prompt, _ in engine.sent] == list("50")
    assert [t.group_id for t in result.trajectories] == [0, 5]


class Failing(Counting):
    def step(self, messages, row):
        if row.get("bad") == "step":
            raise KeyError("tool broke")
        if row.get("bad") == "type":
            return [{"role": "tool", "content": "a list, no StepResult"}]
        if row.get("bad") == "nan":
            return StepResult(reward=float("nan"))
        return super().step(messages, row)

    def reset(self, row):
        if row.get("bad") == "reset":
            raise OSError("no server")
        return super().reset(row)


def test_a_failing_environment_ends_its_own_trajectory_which_is_still_scored(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Failing(), max_turns=3, rewards=[Constant(1.0)])
    jobs = [ask("a"), ask("b", bad="step"), ask("c", bad="reset"), ask("d", bad="type"), ask("e", bad="nan")]
    result = loop.run(jobs, SamplingParams(), 0)
    assert [(t.messages[0]["content"], t.num_turns, t.reward) for t in result.trajectories] == [
        ("a", 3, 1.0),
        ("b", 1, 1.0),
        ("d", 1, 1.0),
        ("e", 1, 1.0),
    ]
    assert result.environment_errors == {
        "step/KeyError": 1,
        "reset/OSError": 1,
        "step/TypeError": 1,
        "step/ValueError": 1,
    }
    assert result.num_dropped == 1


@pytest.mark.parametrize(("where", "message"), [("step", "tool broke"), ("reset", "no server")])
def test_a_failing_environment_stops_the_run_on_request(tokenizer, where, message):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Failing(), max_turns=3, on_environment_error="error")
    with pytest.raises(ValueError, match=rf"Failing.{where} raised .*{message}.*on_environment_error: end"):
        loop.run([ask("a"), ask("b", bad=where), ask("c")], SamplingParams(), 0)
    assert engine.unfinished == 0


def test_tools_wait_beside_one_another_and_beside_generation(tokenizer):
    class Slow(Environment):
        def step(self, messages, row):
            time.sleep(0.1)
            return StepResult([{"role": "tool", "content": "done"}])

    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Slow(), max_turns=3, tool_workers=16)
    begin = time.perf_counter()
    result = loop.run([ask("a", i) for i in range(16)], SamplingParams(), 0)
    assert all(t.num_turns == 3 for t in result.trajectories)
    assert time.perf_counter() - begin < 1.0  # two waits of 0.1 s each; one after the other they take 3.2 s


def test_more_calls_than_threads_all_come_back(tokenizer):
    engine = ScriptedEngine(tokenizer, echo)
    loop = RolloutLoop(engine, tokenizer, environment=Failing(), max_turns=2, rewards=[Constant(1.0)], tool_workers=1)
    jobs = [ask(f"{i}", i, bad="reset" if i % 10 == 3 else "") for i in range(40)]
    result = loop.run(jobs, SamplingParams(), 0)
    assert [t.group_id for t in result.trajectories] == [i for i in range(40) if i % 10 != 3]
    assert [t.messages[-1]["content"] for t in result.trajectories] == [f"{i}" for i in range(40) if i % 10 != 3]


# -- rewards ------------------------------------------------------------------------------------------------------


def test_transforms_see_all_trajectories_and_their_groups(tokenizer):
    class Best(RewardTransform):
        def __call__(self, scores, group_ids, weights):
            assert weights == {"length": 3.0}
            assert group_ids.tolist() == [7, 7, 9]
            return scores["length"] * 10

    class Length(Constant):
        def __call__(self, trajectory):
            return trajectory.num_actions

    engine = ScriptedEngine(tokenizer, echo)
    loop = RolloutLoop(engine, tokenizer, rewards=[Length(0, "length", 3.0)], transform=Best())
    result = loop.run([ask("aa", 7), ask("bbb", 7, 1), ask("c", 9)], SamplingParams(), 0)
    assert [t.reward for t in result.trajectories] == [30.0, 40.0, 20.0]
    assert [t.scores["length"] for t in result.trajectories] == [3.0, 4.0, 2.0]


def only_b(messages, answer):
    if messages[0]["content"] == "b":
        raise ZeroDivisionError("b")
    return answer


@pytest.mark.parametrize(("policy", "kept"), [("zero", [1.0, 0.0, 1.0]), ("drop", [1.0, 1.0])])
def test_failing_rewards_are_counted(tokenizer, policy, kept):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, rewards=[FunctionReward(only_b)], on_reward_error=policy)
    result = loop.run([ask(x, answer=1.0) for x in "abc"], SamplingParams(), 0)
    assert [t.reward for t in result.trajectories] == kept
    assert result.reward_errors == {"only_b/raised_ZeroDivisionError": 1}
    assert result.num_dropped == 3 - len(kept)


def test_a_failing_reward_stops_the_run_by_default(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, rewards=[FunctionReward(only_b)])
    with pytest.raises(ValueError, match="reward 'only_b' raised ZeroDivisionError"):
        loop.run([ask(x, answer=1.0) for x in "abc"], SamplingParams(), 0)
    assert engine.unfinished == 0


def test_a_transform_that_makes_nan_is_an_error(tokenizer):
    class Broken(RewardTransform):
        def __call__(self, scores, group_ids, weights):
            return scores["constant"] / 0 * 0

    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, rewards=[Constant(1.0)], transform=Broken())
    with pytest.raises(ValueError, match="Broken made nan"):
        loop.run([ask("a")], SamplingParams(), 0)


def test_rewards_of_the_environment_are_named_rewards(tokenizer):
    class Scoring(Counting):
        @property
        def rewards(self):
            return {"own": lambda messages, row: len(messages) + row["extra"]}

    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Scoring(), rewards=[Constant(1.0)])
    (t,) = loop.run([ask("a", extra=3)], SamplingParams(), 0).trajectories
    assert (list(t.scores.items()), t.reward) == ([("constant", 1.0), ("own", 5.0)], 6.0)


# -- ends and refusals --------------------------------------------------------------------------------------------


def test_an_engine_that_fails_leaves_no_request_and_no_thread(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>", fail_after=7)
    loop = RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=3)
    with pytest.raises(OSError, match="fell off"):
        loop.run([ask("a", i) for i in range(6)], SamplingParams(), 0)
    assert engine.unfinished == 0
    assert no_threads_left()


def test_an_interrupt_in_the_middle_leaves_no_request(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")

    def interrupt(finished: int, total: int, tokens: int) -> None:
        if finished == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        RolloutLoop(engine, tokenizer).run([ask("a", i) for i in range(6)], SamplingParams(), 0, progress=interrupt)
    assert engine.unfinished == 0


def test_progress_ends_with_everything_finished(tokenizer):
    seen = []
    engine = ScriptedEngine(tokenizer, lambda prompt: "xy<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, rewards=[Constant(1.0)])
    loop.run([ask("a", i) for i in range(4)], SamplingParams(), 0, progress=lambda *x: seen.append(x))
    assert seen[-1] == (4, 4, 12)
    assert seen == sorted(seen)


def test_it_runs_inside_an_event_loop_as_notebooks_have_one(tokenizer):
    import asyncio

    async def cell():
        engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
        return RolloutLoop(engine, tokenizer, environment=Counting(), max_turns=2).run([ask("a")], SamplingParams(), 0)

    assert asyncio.run(cell()).trajectories[0].num_turns == 2


def test_no_jobs_give_an_empty_result(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    result = RolloutLoop(engine, tokenizer, rewards=[Constant(1.0)]).run([], SamplingParams(), 0)
    assert (result.trajectories, result.num_tokens) == ([], 0)


def test_a_busy_engine_is_refused(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    engine.submit("someone else's", [3], SamplingParams(), seed=0)
    with pytest.raises(RuntimeError, match="1 unfinished"):
        RolloutLoop(engine, tokenizer).run([ask("a")], SamplingParams(), 0)
    assert engine.unfinished == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_turns": 0}, "max_turns=0"),
        ({"max_turns": 2}, "max_turns=2 needs an environment"),
        ({"tool_workers": 0}, "tool_workers=0"),
        ({"rewards": [Constant(0), Constant(1)]}, "two rewards are named 'constant'"),
    ],
)
def test_settings_that_cannot_work_are_refused(tokenizer, settings, message):
    with pytest.raises(ValueError, match=message):
        RolloutLoop(ScriptedEngine(tokenizer, str), tokenizer, **settings)


# -- tools --------------------------------------------------------------------------------------------------------


def double(x: int) -> int:
    return 2 * x


CALL = '<tool_call>{"name": "double", "arguments": {"x": 21}}</tool_call><|im_end|>'


def test_a_tool_is_called_and_its_answer_read(tokenizer):
    engine = ScriptedEngine(tokenizer, lambda p: "It is 42.<|im_end|>" if "tool\n42" in p else CALL)
    environment = ToolEnvironment([double], success_reward=0.5, describe="none")
    loop = RolloutLoop(engine, tokenizer, environment=environment, max_turns=3, rewards=[Constant(1.0)])
    result = loop.run([ask("?", i) for i in range(3)], SamplingParams(), 0)
    assert [m["content"] for m in result.trajectories[0].messages[2:]] == ["42", "It is 42."]
    assert [t.reward for t in result.trajectories] == [1.5] * 3
    assert result.counts == {"tool_calls": 3, "tool_errors": 0}
    assert result.environment_errors == {}


def test_what_a_tool_says_cannot_break_the_rendering_of_a_turn(tokenizer):
    def quote() -> str:
        return "[[the-assistant-said-this]]"

    engine = ScriptedEngine(tokenizer, lambda p: '<tool_call>{"name": "quote", "arguments": {}}</tool_call><|im_end|>')
    environment = ToolEnvironment([quote], describe="none")
    loop = RolloutLoop(engine, tokenizer, environment=environment, max_turns=2, rewards=[Constant(1.0)])
    result = loop.run([ask("?")], SamplingParams(), 0)
    assert [(t.num_turns, t.reward) for t in result.trajectories] == [(1, 1.0)]
    assert result.environment_errors == {"reply/ValueError": 1}


def test_a_template_that_drops_the_tools_is_remarked_upon(tokenizer, caplog):
    engine = ScriptedEngine(tokenizer, echo)
    RolloutLoop(engine, tokenizer, environment=ToolEnvironment([double]), max_turns=2)
    assert "the chat template ignores the tools of ToolEnvironment" in caplog.text
    caplog.clear()
    RolloutLoop(engine, tokenizer, environment=ToolEnvironment([double], describe="system"), max_turns=2)
    assert not caplog.text


class Asynchronous(Environment):
    """Waits beside the others in one event loop; `bad` rows wait for ever, or fail."""

    timeout = 1.0

    def __init__(self) -> None:
        self.waiting, self.most = 0, 0

    async def reset(self, row):
        return row["messages"]

    async def step(self, messages, row):
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(600 if row.get("bad") == "hangs" else 0.02)
        self.waiting -= 1
        if row.get("bad") == "raises":
            raise KeyError("gone")
        return StepResult([{"role": "tool", "content": "ok"}], reward=0.5)


def test_asynchronous_steps_wait_together_and_a_late_one_ends_its_own_trajectory(tokenizer):
    environment = Asynchronous()
    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=environment, max_turns=2, rewards=[Constant(1.0)])
    jobs = [ask("?", i, bad={3: "hangs", 4: "raises"}.get(i)) for i in range(16)]
    for _ in range(2):  # the event loop is there for the next rollout too
        result = loop.run(jobs, SamplingParams(), 0)
        assert [t.reward for t in result.trajectories] == [1.0 if i in (3, 4) else 1.5 for i in range(16)]
        assert result.environment_errors == {"step/TimeoutError": 1, "step/KeyError": 1}
    assert environment.most > 4


def test_a_step_that_hangs_in_its_thread_is_left_behind_where_the_environment_sets_a_limit(tokenizer):
    gate = threading.Event()

    class Hanging(Counting):
        timeout = 1.0

        def step(self, messages, row):
            if row.get("bad"):
                gate.wait(60)
            return super().step(messages, row)

    engine = ScriptedEngine(tokenizer, lambda prompt: "x<|im_end|>")
    loop = RolloutLoop(engine, tokenizer, environment=Hanging(), max_turns=2)
    result = loop.run([ask("a"), ask("b", bad=True)], SamplingParams(), 0)
    gate.set()
    assert [t.num_turns for t in result.trajectories] == [2, 1]
    assert result.environment_errors == {"step/TimeoutError": 1}
