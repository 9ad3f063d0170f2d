from __future__ import annotations

import threading
import time

import pytest

from rl2lightning.environments.base import StepResult
from rl2lightning.environments.tool_calls import TagFormat
from rl2lightning.environments.tools import FunctionTool, ToolEnvironment

ROW = {"messages": [{"role": "user", "content": "?"}]}


def double(x: int) -> int:
    """Doubles."""
    return 2 * x


def broken(x: int) -> int:
    raise KeyError("no such thing")


def hang(x: int) -> int:
    time.sleep(x)
    return x


def garbage(x: int) -> object:
    return object()


def call(name: str = "double", arguments: str = '{"x": 2}') -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


def said(*turns: str) -> list[dict]:
    """A conversation of assistant turns, each but the last answered."""
    messages = list(ROW["messages"])
    for turn in turns:
        messages += [{"role": "assistant", "content": turn}, {"role": "tool", "content": "…"}]
    return messages[:-1]


def contents(result: StepResult) -> list[str]:
    return [message["content"] for message in result.messages]


def test_a_call_is_answered_and_a_turn_without_one_is_the_last():
    environment = ToolEnvironment([double])
    result = environment.step(said(call()), ROW)
    assert result.messages == [{"role": "tool", "name": "double", "content": "4"}]
    assert (result.done, result.reward, result.counts) == (False, 0.0, {"tool_calls": 1, "tool_errors": 0})
    assert environment.step(said("It is 4."), ROW) == StepResult(done=True)


def test_calls_of_one_turn_run_side_by_side_and_are_answered_in_order():
    together = threading.Barrier(3)

    def meet(x: int) -> int:
        together.wait(10)  # which only three at a time get through
        return x

    environment = ToolEnvironment([meet, double])
    turn = "".join(call("meet", f'{{"x": {x}}}') for x in range(3)) + call()
    assert contents(environment.step(said(turn), ROW)) == ["0", "1", "2", "4"]


@pytest.mark.parametrize(
    ("turn", "cause", "message"),
    [
        ("<tool_call>double(2)</tool_call>", "malformed", "Error: the call is not valid JSON"),
        ('<tool_call>{"name": "double"', "malformed", "Error: each call must stand between"),
        (call("triple"), "unknown_tool", "Error: no tool 'triple'; there are: double, broken, hang, garbage"),
        (call(arguments='{"x": "2"}'), "bad_arguments", "Error: double: argument 'x' must be an integer, not '2'"),
        (call(arguments="{}"), "bad_arguments", "Error: double: missing argument 'x' (expected: x)"),
        (call("broken"), "raised", "Error: broken: KeyError: 'no such thing'"),
        (call("hang", '{"x": 600}'), "timeout", "Error: hang: no result within 0.2 s"),
        (call("garbage"), "garbage", "Error: garbage: it returned object, which is neither text nor JSON"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model_and_counted(turn, cause, message):
    environment = ToolEnvironment([double, broken, FunctionTool(hang, timeout=0.2), garbage], error_reward=-0.1)
    result = environment.step(said(turn), ROW)
    (content,) = contents(result)
    assert content.startswith(message)
    assert (result.done, result.reward) == (False, -0.1)
    assert result.counts == {"tool_calls": 1, "tool_errors": 1, f"tool_errors/{cause}": 1}


@pytest.mark.parametrize(("name", "ends"), [("broken", True), ("hang", True), ("garbage", True), ("triple", False)])
def test_a_failing_tool_ends_the_episode_on_request_and_a_wrong_call_does_not(name, ends):
    tools = [broken, FunctionTool(hang, timeout=0.1), garbage]
    environment = ToolEnvironment(tools, on_tool_error="end")
    result = environment.step(said(call(name)), ROW)
    assert result.done == ends
    assert result.counts["tool_errors"] == 1


def test_each_call_costs_and_is_rewarded_by_its_outcome():
    environment = ToolEnvironment([double, broken], call_cost=0.01, success_reward=0.5, error_reward=-0.1)
    result = environment.step(said(call() + call() + call("broken")), ROW)
    assert result.reward == pytest.approx(2 * 0.5 - 0.1 - 3 * 0.01)


def test_no_more_than_max_calls_are_run_in_a_trajectory():
    environment = ToolEnvironment([double], max_calls=3)
    first = environment.step(said(call() + call()), ROW)
    assert contents(first) == ["4", "4"]
    second = environment.step(said(call() + call(), call() + call()), ROW)
    assert contents(second) == ["4", "Error: no more than 3 calls"]
    assert second.counts["tool_errors/no_calls_left"] == 1
    third = environment.step(said(call() + call(), call() + call(), call()), ROW)
    assert contents(third) == ["Error: no more than 3 calls"]


def test_calls_that_the_prompt_shows_are_not_the_trajectorys():
    row = {"messages": said(call(), "4") + ROW["messages"]}
    environment = ToolEnvironment([double], max_calls=1)
    messages = [*row["messages"], {"role": "assistant", "content": call()}]
    assert contents(environment.step(messages, row)) == ["4"]


def test_a_flood_of_calls_in_one_turn_gets_one_error_for_the_rest():
    environment = ToolEnvironment([double], max_calls_per_turn=2)
    assert contents(environment.step(said(call() * 100), ROW)) == [
        "4",
        "4",
        "Error: no more than 2 calls in one turn; 98 were left out",
    ]


def test_a_long_result_is_cut():
    def long(x: int) -> str:
        return "ab" * x

    environment = ToolEnvironment([long], max_chars=5)
    assert contents(environment.step(said(call("long", '{"x": 4}')), ROW)) == ["ababa… (3 more characters)"]


def test_schemas_go_to_the_template_or_into_a_system_message():
    schema = ToolEnvironment([double]).tools[0]
    assert (schema["function"]["name"], schema["function"]["description"]) == ("double", "Doubles.")
    environment = ToolEnvironment([double], describe="system", role="user")
    assert environment.tools is None
    system, user = environment.reset(ROW)
    assert (system["role"], user) == ("system", ROW["messages"][0])
    assert '"name": "double"' in system["content"]
    assert environment.format.example in system["content"]
    with_system = {"messages": [{"role": "system", "content": "Be brief."}, *ROW["messages"]]}
    begin, *_ = environment.reset(with_system)
    assert begin["content"].startswith("Be brief.\n\nYou may call")
    assert with_system["messages"][0]["content"] == "Be brief."
    assert environment.step(said(call()), ROW).messages[0]["role"] == "user"


def test_another_format_calls_the_same_tools():
    def find(query: str) -> str:
        return query.upper()

    environment = ToolEnvironment([find], format=TagFormat("find", "query"))
    assert contents(environment.step(said("<search>ada</search>"), ROW)) == ["<information>ADA</information>"]


def test_tools_are_named_by_import_path(tmp_path):
    (tmp_path / "tools.py").write_text("async def triple(x: int):\n    return 3 * x\n")
    environment = ToolEnvironment([f"{tmp_path}/tools.py:triple", "rl2lightning.rewards.math.last_boxed"])
    assert contents(environment.step(said(call("triple") + call("last_boxed", '{"text": "\\\\boxed{7}"}')), ROW)) == [
        "6",
        "7",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tools": []}, "environment.init_args.tools is empty"),
        ({"tools": [double, FunctionTool(broken, name="double")]}, "two tools are named 'double'"),
        ({"tools": ["gone.py:f"]}, "environment.init_args.tools='gone.py': no such file"),
        ({"tools": [double], "max_calls_per_turn": 0}, "max_calls_per_turn=0 must be at least 1"),
        ({"tools": [double], "max_chars": 0}, "max_chars=0 must be at least 1"),
    ],
)
def test_a_senseless_setting_is_said_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        ToolEnvironment(**arguments)


def test_a_time_limit_is_positive():
    with pytest.raises(ValueError, match="tool 'double': timeout=0 must be positive"):
        FunctionTool(double, timeout=0)
