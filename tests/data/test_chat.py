import json

import pytest
from transformers import PreTrainedTokenizerFast

from rl2lightning.data.chat import (
    as_messages,
    encode_chat,
    encode_prompt,
    encode_reply,
    load_tokenizer,
    stop_token_ids,
)


def user(content):
    return {"role": "user", "content": content}


def assistant(content, **more):
    return {"role": "assistant", "content": content, **more}


def tool(content):
    return {"role": "tool", "content": content}


def marked(tokenizer, encoded):
    """The text with every trained token in double angle marks, token for token: `ab⟪c⟫⟪d⟫`."""
    ids, mask = encoded
    assert len(ids) == len(mask)
    pieces = [tokenizer.decode([i]) for i in ids]
    return "".join(f"⟪{piece}⟫" if trained else piece for piece, trained in zip(pieces, mask, strict=True))


TWO_TURNS = [user("a"), assistant("bc"), user("d"), assistant("e")]


def test_chatml_trains_each_answer_through_its_end_of_turn_and_leaves_the_newline_behind_it(chatml):
    (encoded,) = encode_chat(chatml, TWO_TURNS)
    assert marked(chatml, encoded) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟪b⟫⟪c⟫⟪<|im_end|>⟫"
        "\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n⟪e⟫⟪<|im_end|>⟫"
    )


def test_llama3_trains_each_answer_through_its_end_of_turn(llama3):
    (encoded,) = encode_chat(llama3, TWO_TURNS)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert marked(llama3, encoded) == (
        f"<|bos|>{header.format('user')}a<|eot_id|>{header.format('assistant')}⟪b⟫⟪c⟫⟪<|eot_id|>⟫"
        f"{header.format('user')}d<|eot_id|>{header.format('assistant')}⟪e⟫⟪<|eot_id|>⟫"
    )


def test_a_template_that_drops_past_thinking_splits_the_conversation(thinking):
    messages = [user("a"), assistant("<think>x</think>b"), user("c"), assistant("<think>y</think>d")]
    first, second = encode_chat(thinking, messages)
    trained = "".join(f"⟪{c}⟫" for c in "<think>x</think>b")
    assert marked(thinking, first) == (f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{trained}⟪<|im_end|>⟫")
    trained = "".join(f"⟪{c}⟫" for c in "<think>y</think>d")
    assert marked(thinking, second) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>"
        f"\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n{trained}⟪<|im_end|>⟫"
    )


def test_turns_around_tool_results_stay_in_one_sequence_because_their_thinking_is_kept(thinking):
    messages = [user("a"), assistant("<think>x"), tool("1"), tool("2"), assistant("d")]
    (encoded,) = encode_chat(thinking, messages)
    trained = "".join(f"⟪{c}⟫" for c in "<think>x")
    assert marked(thinking, encoded) == (
        f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{trained}⟪<|im_end|>⟫"
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>"
        "\n<|im_start|>assistant\n⟪d⟫⟪<|im_end|>⟫"
    )


def test_train_on_last_trains_the_final_turn_only(chatml, thinking):
    (encoded,) = encode_chat(chatml, TWO_TURNS, train_on="last")
    assert marked(chatml, encoded) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nbc<|im_end|>"
        "\n<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n⟪e⟫⟪<|im_end|>⟫"
    )
    messages = [user("a"), assistant("<think>x</think>b"), user("c"), assistant("d")]
    (encoded,) = encode_chat(thinking, messages, train_on="last")  # one sequence also where the template rewrites
    assert marked(thinking, encoded).endswith("assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
                                              "<|im_start|>assistant\n⟪d⟫⟪<|im_end|>⟫")  # fmt: skip


def test_train_on_all_trains_every_token_but_the_first(chatml):
    (ids, mask), ((same_ids, _),) = encode_chat(chatml, TWO_TURNS, train_on="all")[0], encode_chat(chatml, TWO_TURNS)
    assert ids == same_ids
    assert mask == [False] + [True] * (len(ids) - 1)


def test_masks_do_not_depend_on_what_the_padding_token_is(chatml):
    assert chatml.pad_token_id == chatml.eos_token_id
    ids, mask = encode_chat(chatml, TWO_TURNS)[0]
    ends = [trained for i, trained in zip(ids, mask, strict=True) if i == chatml.eos_token_id]
    assert ends == [False, True, False, True]  # the users' ends of turn are context, the assistant's are trained


@pytest.mark.parametrize("content", ["n", "", "i", "<|im_end|>x", " padded "])
def test_the_end_of_turn_is_found_behind_any_content(chatml, content):
    ids, mask = encode_chat(chatml, [user("a"), assistant(content)])[0]
    trained = [i for i, m in zip(ids, mask, strict=True) if m]
    assert chatml.decode(trained) == content + "<|im_end|>"


def test_the_prompt_is_the_beginning_of_the_training_sequence(chatml, llama3, thinking, bpe):
    for tokenizer in (chatml, llama3, thinking, bpe):
        for apply_chat_template in (True, False):
            prompt = encode_prompt(tokenizer, TWO_TURNS[:1], apply_chat_template=apply_chat_template)
            ids, mask = encode_chat(tokenizer, TWO_TURNS[:2], apply_chat_template=apply_chat_template)[0]
            assert ids[: len(prompt)] == prompt
            assert mask == [False] * len(prompt) + [True] * (len(ids) - len(prompt))


def test_no_token_straddles_the_border_of_what_is_trained(bpe):
    whole = bpe("assistant\n\nbanana", add_special_tokens=False)["input_ids"]
    parts = bpe("assistant\n", add_special_tokens=False)["input_ids"]
    parts += bpe("\nbanana", add_special_tokens=False)["input_ids"]
    assert whole != parts  # this tokenizer merges the two newlines, so the border matters
    ids, mask = encode_chat(bpe, [user("a"), assistant("\nbanana")])[0]
    prompt = encode_prompt(bpe, [user("a")])
    assert ids[: len(prompt)] == prompt
    assert bpe.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "\nbanana<|im_end|>"
    assert ids[len(prompt) : -1] == bpe("\nbanana", add_special_tokens=False)["input_ids"]


def test_without_the_template_contents_are_joined_and_a_trained_final_turn_gets_eos(chatml):
    (encoded,) = encode_chat(chatml, TWO_TURNS, apply_chat_template=False)
    assert marked(chatml, encoded) == "a⟪b⟫⟪c⟫d⟪e⟫⟪<|im_end|>⟫"
    (encoded,) = encode_chat(chatml, [assistant("xyz")], apply_chat_template=False)
    assert marked(chatml, encoded) == "x⟪y⟫⟪z⟫⟪<|im_end|>⟫"  # nothing predicts a first token
    assert chatml.decode(encode_prompt(chatml, TWO_TURNS[:3], apply_chat_template=False)) == "abcd"


def test_without_the_template_the_tokenizers_own_beginning_is_kept(chatml):
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    backend = Tokenizer.from_str(chatml.backend_tokenizer.to_str())
    backend.post_processor = TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>")
    assert encode_prompt(tokenizer, [user("a")], apply_chat_template=False) == tokenizer("a")["input_ids"]
    (encoded,) = encode_chat(tokenizer, [user("a"), assistant("b")], apply_chat_template=False)
    assert marked(tokenizer, encoded) == "<|bos|>a⟪b⟫⟪<|im_end|>⟫"


def test_a_generation_prompt_that_a_finished_turn_does_not_repeat(chatml, monkeypatch):
    opened = chatml.chat_template.replace("<|im_start|>assistant\n", "<|im_start|>assistant\n<think>")
    monkeypatch.setattr(chatml, "chat_template", opened)
    assert chatml.decode(encode_prompt(chatml, [user("a")])).endswith("assistant\n<think>")
    (encoded,) = encode_chat(chatml, [user("a"), assistant("<b")])
    assert marked(chatml, encoded) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟪<⟫⟪b⟫⟪<|im_end|>⟫"


def test_a_reply_continues_generated_tokens_as_the_template_would(chatml, llama3, thinking):
    for tokenizer in (chatml, llama3, thinking):
        stop = tokenizer.eos_token_id
        prompt = encode_prompt(tokenizer, [user("a")])
        generated = tokenizer("bc", add_special_tokens=False)["input_ids"]
        conversation, new = [user("a"), assistant("bc")], [user("d")]
        whole = encode_prompt(tokenizer, conversation + new)
        finished = encode_reply(tokenizer, conversation, new, stop_token_id=stop)
        assert prompt + generated + [stop] + finished == whole
        cut_off = encode_reply(tokenizer, conversation, new, stop_token_id=None)
        assert prompt + generated + cut_off == whole


def test_a_reply_never_tokenises_generated_text_again(bpe):
    conversation = [user("a"), assistant("bananas"), user("b")]
    reply = encode_reply(bpe, conversation[:2], [user("b")], stop_token_id=bpe.eos_token_id)
    letters = [bpe(c, add_special_tokens=False)["input_ids"][0] for c in "bananas"]  # a rare way to spell it
    assert letters != bpe("bananas", add_special_tokens=False)["input_ids"]
    tokens = [*encode_prompt(bpe, [user("a")]), *letters, bpe.eos_token_id, *reply]
    assert bpe.decode(tokens) == bpe.decode(encode_prompt(bpe, conversation))
    # whatever was generated, also what the template would trim or rewrite, the reply is the same
    for generated in ("", "  x  ", "<think>y</think>z", "[[weird]]"):
        other = encode_reply(bpe, [user("a"), assistant(generated)], [user("b")], stop_token_id=bpe.eos_token_id)
        assert other == reply


def test_a_reply_of_tool_results_is_rendered_in_one_piece(thinking):
    conversation = [user("a"), assistant("call", tool_calls=[{"function": {"name": "f", "arguments": {}}}])]
    ids = encode_reply(thinking, conversation, [tool("1"), tool("2")], stop_token_id=thinking.eos_token_id)
    assert thinking.decode(ids) == (
        "\n<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_a_reply_after_another_stop_token_keeps_the_templates_end_of_turn(chatml):
    other = chatml.convert_tokens_to_ids("<|eot_id|>")
    ids = encode_reply(chatml, [user("a"), assistant("b")], [user("<|eot_id|>")], stop_token_id=other)
    assert chatml.decode(ids) == "<|im_end|>\n<|im_start|>user\n<|eot_id|><|im_end|>\n<|im_start|>assistant\n"


def test_a_reply_without_the_template_is_the_bare_content(chatml):
    ids = encode_reply(chatml, [user("a"), assistant("b")], [tool("1"), user("2")], stop_token_id=None,
                       apply_chat_template=False)  # fmt: skip
    assert chatml.decode(ids) == "12"


def test_tools_reach_the_template(thinking):
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    prompt = thinking.decode(encode_prompt(thinking, [user("a")], tools=tools))
    assert prompt.startswith("<|im_start|>system\n")
    assert '"name": "f"' in prompt
    (ids, _), = encode_chat(thinking, [user("a"), assistant("b")], tools=tools)  # fmt: skip
    assert thinking.decode(ids).startswith(prompt)


def test_stop_tokens_are_eos_those_of_the_generation_config_and_the_templates_end_of_turn(llama3, tmp_path):
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama3.backend_tokenizer, eos_token="<|pad|>")
    tokenizer.chat_template = llama3.chat_template
    pad, eot, im_end = (tokenizer.convert_tokens_to_ids(t) for t in ("<|pad|>", "<|eot_id|>", "<|im_end|>"))
    assert stop_token_ids(tokenizer, str(tmp_path)) == tuple(sorted((pad, eot)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [pad, im_end]}))
    assert stop_token_ids(tokenizer, str(tmp_path)) == tuple(sorted((pad, im_end, eot)))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": im_end}))
    assert stop_token_ids(tokenizer, str(tmp_path), apply_chat_template=False) == tuple(sorted((pad, im_end)))


def test_messages_may_be_a_string_and_carry_the_nulls_of_a_table():
    assert as_messages("hello") == [user("hello")]
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert as_messages([{"role": "user", "content": "a", "tool_calls": None}, call]) == [
        user("a"),
        assistant("", tool_calls=[{"name": "f"}]),
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "must be a list of messages or a string, not int"),
        ([], "list of messages is empty"),
        (["a"], "message 0 must be a dict with role and content, not str"),
        ([user("a"), {"from": "gpt", "value": "b"}], r"message 1 has role None \(its keys: from, value\)"),
        ([{"role": "asistant", "content": "b"}], "message 0 has role 'asistant'"),
        ([user(["a"])], r"message 0 \(user\) needs a string as content, not list"),
        ([assistant(None)], r"message 0 \(assistant\) needs a string as content, not NoneType"),
    ],
)
def test_bad_messages_are_named(value, message):
    with pytest.raises(ValueError, match=message):
        as_messages(value)


def test_a_conversation_to_imitate_ends_with_the_assistant_and_a_reply_follows_one(chatml):
    with pytest.raises(ValueError, match="must end with an assistant turn, not with user"):
        encode_chat(chatml, TWO_TURNS[:3])
    with pytest.raises(ValueError, match="a reply follows an assistant turn"):
        encode_reply(chatml, [user("a")], [user("b")], stop_token_id=None)


def test_a_template_that_raises_or_is_missing_is_an_error_that_says_so(chatml, monkeypatch):
    monkeypatch.setattr(chatml, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(ValueError, match="refuses a conversation of user: roles must alternate"):
        encode_prompt(chatml, [user("a")])
    monkeypatch.setattr(chatml, "chat_template", None)
    with pytest.raises(ValueError, match="no chat template: set apply_chat_template to false"):
        encode_prompt(chatml, [user("a")])


def test_a_template_that_does_not_repeat_the_content_cannot_be_replied_to(chatml, monkeypatch):
    monkeypatch.setattr(chatml, "chat_template", "{% for m in messages %}{{ m.content | upper }}{% endfor %}")
    with pytest.raises(ValueError, match="exactly once, word for word"):
        encode_reply(chatml, [user("a"), assistant("b")], [user("c")], stop_token_id=None)


def test_loading_a_tokenizer(tokenizer_path, chatml, tmp_path):
    assert load_tokenizer(tokenizer_path).chat_template == chatml.chat_template
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match=r"no tokenizer in .* set model\.init_args\.tokenizer"):
        load_tokenizer(str(tmp_path))


def test_a_name_that_exists_nowhere_is_named(monkeypatch):
    def offline(*args, **kwargs):
        raise OSError("We couldn't connect.\nRead the manual.")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", offline)
    with pytest.raises(
        ValueError, match=r"'my-model' is no directory here .* the hub: We couldn't connect\.; set model\."
    ):
        load_tokenizer("my-model")


def test_a_checkpoint_in_the_place_of_a_model_is_to_be_exported(tmp_path):
    checkpoint = tmp_path / "last.ckpt"
    (checkpoint / "dcp").mkdir(parents=True)
    (checkpoint / "meta.pt").touch()
    command = f"rl2lightning export --ckpt_path {checkpoint} --output_dir {tmp_path}/last-model"
    with pytest.raises(ValueError, match=f"is a checkpoint, not a model directory: .*`{command}` and name that"):
        load_tokenizer(str(checkpoint))


def test_an_adapter_in_the_place_of_a_model_belongs_into_lora_path(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    with pytest.raises(ValueError, match=r"is an adapter, .*\('some/base'\) .*set model\.init_args\.lora\.path to it"):
        load_tokenizer(str(tmp_path))


def test_bad_messages_name_their_column():
    for value, message in (
        (3, "^'chosen' must be a list of messages or a string, not int"),
        ([], "^the list of messages of 'chosen' is empty"),
        (["a"], "^message 0 of 'chosen' must be a dict"),
        ([assistant(3)], r"^message 0 of 'chosen' \(assistant\) needs a string"),
    ):
        with pytest.raises(ValueError, match=message):
            as_messages(value, key="chosen")
