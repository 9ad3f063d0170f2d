import pytest

from rl2lightning.rewards.format import RegexReward
from rl2lightning.types import Trajectory


def says(text: str) -> Trajectory:
    messages = [
        {"role": "assistant", "content": "<think>early</think>"},
        {"role": "tool", "content": "<answer>x</answer>"},
    ]
    return Trajectory(row={}, group_id=0, messages=[*messages, {"role": "assistant", "content": text}])


def test_the_last_assistant_message_counts_and_lines_may_break():
    reward = RegexReward(r"^<think>.*</think>\s*<answer>.+</answer>$")
    assert reward(says("<think>a\nb</think>\n<answer>4</answer>")) == 1.0
    assert reward(says("<think>a</think> so <answer>4</answer>")) == 0.0
    assert reward(says("4")) == 0.0
    assert RegexReward("answer")(says("the answer is")) == 1.0


def test_a_broken_pattern_is_named():
    with pytest.raises(ValueError, match=r"rewards.pattern='\(' is no regular expression"):
        RegexReward("(")
