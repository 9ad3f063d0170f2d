from __future__ import annotations

import pytest

from rl2lightning.environments.tool_calls import HermesFormat, LlamaFormat, QwenCoderFormat, TagFormat, ToolCall

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("The answer is 4.", []),
        (ADD, [ToolCall("add", {"a": 1})]),
        (f"First {ADD}\nthen {ADD} now", [ToolCall("add", {"a": 1})] * 2),
        (f"<think>or {ADD}?</think>no", []),
        (f"or {ADD}?</think>{ADD}", [ToolCall("add", {"a": 1})]),  # the prompt opened the thinking
        (f"<think>endless {ADD}", []),
        ('<tool_call>{"name": "now"}</tool_call>', [ToolCall("now", {})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ToolCall("add", {"a": 1})]),
    ],
)
def test_hermes_calls_are_found(text, calls):
    assert HermesFormat().parse(text) == calls


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("<tool_call>add(1)</tool_call>", "the call is not valid JSON: Expecting value at character 0"),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}', "between <tool_call> and </tool_call>"),
        ('{"name": "add"}</tool_call>', "between <tool_call> and </tool_call>"),
        ("<tool_call>[1]</tool_call>", '"name" and "arguments"'),
        ('<tool_call>{"name": 3}</tool_call>', '"name" and "arguments"'),
        ('<tool_call>{"name": "add", "arguments": "a"}</tool_call>', "must be a JSON object, not a string"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "not valid JSON"),
    ],
)
def test_a_malformed_call_is_a_call_with_an_error(text, error):
    (call,) = HermesFormat().parse(text)
    assert error in call.error


def test_a_call_inside_an_unclosed_one_is_found_beside_the_error():
    broken, whole = HermesFormat().parse(f"<tool_call>{{{ADD}")
    assert broken.error is not None
    assert whole == ToolCall("add", {"a": 1})


def test_llama_calls_are_the_whole_turn():
    parse = LlamaFormat().parse
    assert parse(' {"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}') == [
        ToolCall("add", {"a": 1}),
        ToolCall("now", {}),
    ]
    assert parse('The call {"name": "add"} is not made') == []
    assert parse('{"answer": 4}') == []
    assert "not valid JSON" in parse('{"name": "add", ')[0].error


def test_qwen_coder_calls_take_json_for_what_is_no_text():
    parse = QwenCoderFormat().parse
    parameters = "<parameter=a>\n1\n</parameter>\n<parameter=b>x\ny</parameter>"
    assert parse(f"<tool_call>\n<function=add>\n{parameters}</function></tool_call>") == [
        ToolCall("add", {"a": 1, "b": "x\ny"})
    ]
    assert parse('<tool_call><function=f><parameter=a>"1"</parameter></function></tool_call>') == [
        ToolCall("f", {"a": '"1"'})
    ]
    assert "<function=name>" in parse("<tool_call>add(1)</tool_call>")[0].error


def test_tags_call_one_tool_and_wrap_its_answer():
    form = TagFormat(tool="search", argument="query")
    (call,) = form.parse("I will <search> who was Ada? </search>")
    assert call == ToolCall("search", {"query": "who was Ada?"})
    assert form.answer(call, "a", "user") == {
        "role": "user",
        "name": "search",
        "content": "<information>a</information>",
    }
    assert "not closed" in form.parse("<search>who")[0].error
    assert TagFormat("f", "x", tag="run", answer_tag="").answer(call, "a", "tool")["content"] == "a"


@pytest.mark.parametrize("form", [HermesFormat(), LlamaFormat(), QwenCoderFormat(), TagFormat("f", "x")])
def test_instructions_name_the_tools_and_an_example(form):
    text = form.instructions([{"type": "function", "function": {"name": "f"}}])
    assert '"name": "f"' in text
    assert form.example in text
