from __future__ import annotations

import asyncio

import pytest

from rl2lightning.environments.base import StepResult
from rl2lightning.environments.script import ScriptEnvironment

REWARD = "def reward_fn(messages, answer):\n    return float(messages[-1]['content'] == answer)\n"
ROW = {"messages": [], "answer": "4", "limit": 2}
SAID = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def script(tmp_path):
    def write(text: str) -> ScriptEnvironment:
        (tmp_path / "env.py").write_text(text)
        return ScriptEnvironment(str(tmp_path / "env.py"))

    return write


def test_a_file_with_a_reward_is_a_single_turn_environment(script):
    environment = script(REWARD)
    assert environment.step(SAID, ROW) == StepResult(done=True)
    assert environment.tools is None
    assert environment.min_turns == 1
    (name, reward), *rest = environment.rewards.items()
    assert (name, rest) == ("reward_fn", [])
    assert (reward(SAID, ROW), reward(SAID, {"answer": "5"})) == (1.0, 0.0)


def test_interact_answers_until_it_returns_nothing(script):
    environment = script(
        REWARD + "def interact(messages, limit):\n"
        "    n = len(messages)\n"
        "    return [{'role': 'tool', 'content': str(n)}] if n <= limit else []\n"
        "TOOLS = [{'type': 'function', 'function': {'name': 'f'}}]\n"
    )
    assert environment.step(SAID, ROW) == StepResult([{"role": "tool", "content": "2"}])
    assert environment.min_turns == 2
    assert environment.step([*SAID, SAID[-1]], ROW) == StepResult(done=True)
    assert environment.tools == [{"type": "function", "function": {"name": "f"}}]
    assert script(REWARD + "def interact(messages): pass").step(SAID, ROW) == StepResult(done=True)


def test_a_script_cannot_change_the_trajectory(script):
    environment = script(
        "def reward_fn(messages, answer):\n    messages.pop()['content'] = 'gone'\n    return 0.0\n"
        "def interact(messages):\n    messages[0]['content'] = 'gone'\n"
    )
    said = [dict(message) for message in SAID]
    environment.step(said, ROW)
    environment.rewards["reward_fn"](said, ROW)
    assert said == SAID


@pytest.mark.parametrize(
    "returned", ["'text'", "{'role': 'tool', 'content': ''}", "[{'content': 'no role'}]", "['text']"]
)
def test_what_is_no_list_of_messages_is_an_error(script, returned):
    environment = script(REWARD + f"def interact(messages):\n    return {returned}\n")
    with pytest.raises(ValueError, match="interact must return a list of messages"):
        environment.step(SAID, ROW)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def reward(messages): ...", r"defines no function reward_fn\(messages, answer\)"),
        ("reward_fn = 3", "defines no function reward_fn"),
        ("import nonsense_that_is_not_there", "could not be imported: ModuleNotFoundError"),
        (REWARD + "interact = 3", "interact is no function"),
        (REWARD + "TOOLS = {'name': 'f'}", "TOOLS must be a list of schemas"),
        ("async def reward_fn(messages, answer): ...", "is a coroutine function"),
    ],
)
def test_what_is_wrong_with_a_script_is_said_at_once(script, text, message):
    with pytest.raises(ValueError, match=message):
        script(text)


def test_a_script_may_have_a_limit_of_time(tmp_path):
    (tmp_path / "env.py").write_text(REWARD)
    assert ScriptEnvironment(str(tmp_path / "env.py"), timeout=2.5).timeout == 2.5
    assert ScriptEnvironment(str(tmp_path / "env.py")).timeout is None
    with pytest.raises(ValueError, match=r"environment\.init_args\.timeout=0 must be positive"):
        ScriptEnvironment(str(tmp_path / "env.py"), timeout=0)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"environment.init_args.path='envs/gone.py': no such file"):
        ScriptEnvironment("envs/gone.py")


def test_an_asynchronous_interact_gives_a_coroutine_with_the_same_outcome(script):
    environment = script(
        REWARD + "async def interact(messages, limit):\n"
        "    return [{'role': 'tool', 'content': 'ok'}] if len(messages) <= limit else None\n"
    )
    assert asyncio.run(environment.step(SAID, ROW)) == StepResult([{"role": "tool", "content": "ok"}])
    assert asyncio.run(environment.step([*SAID, SAID[-1]], ROW)) == StepResult(done=True)
