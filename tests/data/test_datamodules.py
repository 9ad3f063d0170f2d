import json
import warnings
from pathlib import Path

import pytest
import torch

from rl2lightning.data import ChatDataModule, PreferenceDataModule, PromptDataModule, Source
from rl2lightning.data.chat import encode_chat, encode_prompt

REPO = Path(__file__).parents[2]


def write_rows(tmp_path, rows, name="rows.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


def chat_row(prompt, reply, **more):
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": reply}]
    return {"messages": messages, **more}


def set_up(module, trainer, stage="fit"):
    module.trainer = trainer
    module.setup(stage)
    return module


def sequences(batch):
    if batch.sequences is None:
        return []
    ids = batch.sequences.input_ids.split(batch.sequences.lengths.tolist())
    return [part.tolist() for part in ids]


CHAT_ROWS = [chat_row(f"say {i}", str(i), answer=str(i)) for i in range(10)]
PROMPT_ROWS = [{"messages": f"say {i}", "answer": str(i), "level": i % 3} for i in range(10)]


def test_a_chat_batch_holds_the_encoded_rows_with_their_masks(tmp_path, make_trainer, chatml):
    path = write_rows(tmp_path, CHAT_ROWS[:3])
    module = set_up(ChatDataModule(path, batch_size=3, val_ratio=0), make_trainer())
    (batch,) = module.train_dataloader()
    expected = sorted(encode_chat(chatml, row["messages"])[0] for row in CHAT_ROWS[:3])
    masks = [m.tolist() for m in batch.sequences.action_mask.split(batch.sequences.lengths.tolist())]
    assert sorted(zip(sequences(batch), masks, strict=True)) == expected
    assert batch.sequences.truncated.tolist() == [False] * 3
    assert sorted(row["answer"] for row in batch.rows) == ["0", "1", "2"]
    assert {len(row["messages"]) for row in batch.rows} == {1}  # the prompt alone
    assert module.val_dataloader() == []


def test_long_sequences_are_cut_and_those_with_nothing_left_to_train_are_counted(tmp_path, make_trainer, chatml):
    prompt_length = len(encode_prompt(chatml, [{"role": "user", "content": "abc"}]))
    rows = [chat_row("abc", "xyz"), chat_row("abcd", "x")]
    path = write_rows(tmp_path, rows)
    module = ChatDataModule(path, batch_size=2, max_length=prompt_length + 1, val_ratio=0)
    (batch,) = set_up(module, make_trainer()).train_dataloader()
    assert batch.num_dropped == 1
    assert sequences(batch) == [encode_chat(chatml, rows[0]["messages"])[0][0][: prompt_length + 1]]
    assert batch.sequences.action_mask.tolist() == [False] * prompt_length + [True]
    assert batch.sequences.truncated.tolist() == [True]
    assert len(batch.rows) == 2
    module = ChatDataModule(path, batch_size=2, max_length=prompt_length, val_ratio=0)
    (batch,) = set_up(module, make_trainer()).train_dataloader()
    assert (batch.sequences, batch.num_dropped) == (None, 2)


def test_a_conversation_that_is_split_is_one_group(tmp_path, make_trainer, thinking):
    thinking.save_pretrained(tmp_path / "thinking")
    row = chat_row("a", "<think>x</think>b")
    row["messages"] += chat_row("c", "d")["messages"]
    module = ChatDataModule(
        write_rows(tmp_path, [row, chat_row("e", "f")]),
        batch_size=2,
        val_ratio=0,
    )
    (batch,) = set_up(module, make_trainer(tokenizer=str(tmp_path / "thinking"))).train_dataloader()
    groups = batch.sequences.group_ids.tolist()
    assert len(groups) == 3
    assert len(set(groups)) == 2


def test_prompts_and_responses_are_conversations_of_two_turns(tmp_path, make_trainer, chatml):
    path = write_rows(tmp_path, [{"question": "a", "reply": "b"}])
    module = ChatDataModule(
        path,
        batch_size=1,
        prompt_key="question",
        response_key="reply",
        apply_chat_template=False,
        val_ratio=0,
    )
    (batch,) = set_up(module, make_trainer()).train_dataloader()
    assert chatml.decode(sequences(batch)[0]) == "ab<|im_end|>"
    assert batch.rows == [{"messages": [{"role": "user", "content": "a"}]}]
    path = write_rows(tmp_path, [{"question": chat_row("a", "b")["messages"], "reply": "c"}], "answered.jsonl")
    module = ChatDataModule(path, prompt_key="question", response_key="reply", val_ratio=0)
    with pytest.raises(ValueError, match="with an assistant turn as column 'question' does; .* set data.prompt_key"):
        set_up(module, make_trainer())


def all_sequences(module, num_epochs=1):
    loader = module.train_dataloader()
    return [sequences(batch) for _ in range(num_epochs) for batch in loader]


def test_global_batches_are_the_same_on_any_layout_and_with_workers(tmp_path, make_trainer):
    path = write_rows(tmp_path, CHAT_ROWS)
    settings = {"batch_size": 3, "val_ratio": 0.1, "seed": 5}
    whole = all_sequences(set_up(ChatDataModule(path, **settings), make_trainer()), 2)
    assert len(whole) == 6
    for size in (2, 4):
        ranks = [
            all_sequences(set_up(ChatDataModule(path, **settings), make_trainer(rank=r, size=size)), 2)
            for r in range(size)
        ]
        assert [sum(parts, []) for parts in zip(*ranks, strict=True)] == whole
    assert all_sequences(set_up(ChatDataModule(path, num_workers=2, **settings), make_trainer()), 2) == whole


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_held_out_row_comes_exactly_once_over_all_ranks(tmp_path, make_trainer, size):
    path = write_rows(tmp_path, PROMPT_ROWS)
    settings = {"val_ratio": 0.5, "val_batch_size": 3, "prompts_per_rollout": 2}
    modules = [set_up(PromptDataModule(path, **settings), make_trainer(rank=r, size=size)) for r in range(size)]
    for loaders in ([m.val_dataloader() for m in modules], [m.predict_dataloader() for m in modules]):
        assert {len(loader) for loader in loaders} == {2}  # 3 + 2 rows, the same number of batches on every rank
        batches = [list(loader) for loader in loaders]
        indices = [[i for batch in step for i in batch.indices] for step in zip(*batches, strict=True)]
        assert indices == [[0, 1, 2], [3, 4]]
        answers = {row["answer"] for rank in batches for batch in rank for row in batch.rows}
        trained = {PROMPT_ROWS[i]["answer"] for i in modules[0].train_split.indices}
        assert answers == {row["answer"] for row in PROMPT_ROWS} - trained


def test_a_separate_file_of_held_out_rows(tmp_path, make_trainer):
    path, val_path = write_rows(tmp_path, PROMPT_ROWS), write_rows(tmp_path, PROMPT_ROWS[:2], "val.jsonl")
    module = set_up(PromptDataModule(path, val_path=val_path, prompts_per_rollout=2), make_trainer())
    assert len(module.train_split) == 10
    (batch,) = module.test_dataloader()  # batches of 2, as in training
    assert [row["answer"] for row in batch.rows] == ["0", "1"]


def test_predicting_from_conversations_asks_for_their_last_turn(tmp_path, make_trainer):
    module = set_up(ChatDataModule(write_rows(tmp_path, CHAT_ROWS), val_ratio=0.2), make_trainer(), "predict")
    (batch,) = module.predict_dataloader()
    held_out = [CHAT_ROWS[i] for i in module.val_split.indices]
    assert batch.rows == [{**row, "messages": row["messages"][:1]} for row in held_out]
    assert batch.indices == [0, 1]


def test_prompts_keep_their_columns_and_a_string_is_a_user_turn(tmp_path, make_trainer):
    path = write_rows(tmp_path, [{"question": "a", "solution": 3, "level": 1}])
    module = PromptDataModule(path, messages_key="question", answer_key="solution", prompts_per_rollout=1, val_ratio=0)
    (batch,) = set_up(module, make_trainer()).train_dataloader()
    assert batch.rows == [{"level": 1, "messages": [{"role": "user", "content": "a"}], "answer": 3}]


def stream(module, start, stop, draws, loader=None):
    """Steps start to stop as the loader hands them out, with `draws[step]` prompts taken off the stream in each."""
    steps = []
    while start + len(steps) < stop:
        for batch in module.train_dataloader() if loader is None else loader:
            answers = [row["answer"] for row in batch.rows]
            drawn = module.draw(draws.get(start + len(steps), 0))[1]
            steps.append((batch.step_of_rollout, batch.indices, answers, drawn))
            if start + len(steps) == stop:
                break
    return steps


def test_an_epoch_of_prompts_is_fixed_in_optimizer_steps_whatever_refills_take(tmp_path, make_trainer):
    path = write_rows(tmp_path, PROMPT_ROWS)
    module = PromptDataModule(path, prompts_per_rollout=3, val_ratio=0)
    module = set_up(module, make_trainer(updates_per_rollout=2))
    assert len(module.train_dataloader()) == 6  # 10 // 3 rollouts of 2 steps
    steps = stream(module, 0, 12, draws={0: 2, 6: 4})
    assert [step[0] for step in steps] == [0, 1] * 6
    taken = [i for step in steps for i in step[1] + step[3]]
    assert sorted(taken) == list(range(6 * 3 + 6))  # each position once
    rows, positions = set_up(PromptDataModule(path, val_ratio=0), make_trainer()).draw(20)
    assert positions == list(range(20))
    answers = [row["answer"] for row in rows]
    assert sorted(answers[:10]) == sorted(answers[10:]) == sorted(row["answer"] for row in PROMPT_ROWS)
    assert answers[:10] != answers[10:]


@pytest.mark.parametrize("stop", [1, 2, 5, 6, 9])
def test_prompts_resume_mid_rollout_and_after_refills(tmp_path, make_trainer, stop):
    path = write_rows(tmp_path, PROMPT_ROWS)

    def make():
        module = PromptDataModule(path, prompts_per_rollout=3, val_ratio=0, seed=2)
        return set_up(module, make_trainer(updates_per_rollout=2))

    draws = {0: 2, 4: 1, 6: 3}
    uninterrupted = stream(make(), 0, 12, draws)
    interrupted = make()
    assert stream(interrupted, 0, stop, draws) == uninterrupted[:stop]
    resumed = make()
    early = resumed.train_dataloader()  # loaders may be built before the state is restored
    resumed.load_state_dict(json.loads(json.dumps(interrupted.state_dict())))
    assert stream(resumed, stop, 12, draws, early) == uninterrupted[stop:]


def test_a_new_fit_begins_at_the_first_row_and_a_changed_batch_size_warns(tmp_path, make_trainer):
    module = set_up(ChatDataModule(write_rows(tmp_path, CHAT_ROWS), batch_size=2), make_trainer())
    first = all_sequences(module)
    state = module.state_dict()
    rows = {"rows_per_pass": 9, "fingerprint": module.train_split.fingerprint()}
    assert state == {"step": 4, "prompt": 0, "seed": 0, "batch_size": 2, **rows}
    module.setup("validate")
    assert module.position.step == 4
    module.setup("fit")
    assert all_sequences(module) == first
    other = set_up(ChatDataModule(module.path, batch_size=3), make_trainer())
    with pytest.warns(UserWarning, match=r"data.batch_size=3 was 2 in the checkpoint"):
        other.load_state_dict(state)
    set_up(ChatDataModule(module.path, batch_size=3), make_trainer(validating=True)).load_state_dict(state)


def test_going_on_with_other_rows_is_warned_of_and_with_the_same_ones_is_not(tmp_path, make_trainer):
    def make(rows, name, *, weight=1.0, **stage):
        source = Source(write_rows(tmp_path, rows, name), weight)
        return set_up(PromptDataModule([source], prompts_per_rollout=2, val_ratio=0), make_trainer(**stage))

    state = json.loads(json.dumps(make(PROMPT_ROWS, "first.jsonl").state_dict()))
    old = {key: value for key, value in state.items() if key not in ("rows_per_pass", "fingerprint")}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make(PROMPT_ROWS, "elsewhere.jsonl").load_state_dict(state)
        make(PROMPT_ROWS[:8], "fewer.jsonl", validating=True).load_state_dict(state)
        make(PROMPT_ROWS[:8], "fewer.jsonl").load_state_dict(old)  # a checkpoint that says nothing of its rows
    fewer = r"^data.path=.*fewer.jsonl.* gives 8 training rows in a pass, where the checkpoint had 10: the run goes on"
    with pytest.warns(UserWarning, match=fewer):
        make(PROMPT_ROWS[:8], "fewer.jsonl").load_state_dict(state)
    with pytest.warns(UserWarning, match="gives 20 training rows in a pass, where the checkpoint had 10"):
        make(PROMPT_ROWS, "twice.jsonl", weight=2).load_state_dict(state)
    for rows in (PROMPT_ROWS[::-1], [*PROMPT_ROWS[:5], {**PROMPT_ROWS[5], "answer": "other"}, *PROMPT_ROWS[6:]]):
        module = make(rows, f"{rows[0]['answer']}.jsonl")
        with pytest.warns(UserWarning, match="^data.path=.* gives other training rows than the checkpoint: the run"):
            module.load_state_dict({**state, "step": 3})
        assert module.position.step == 3  # and it does go on


def test_a_fingerprint_is_the_same_for_rows_that_are_no_json(tmp_path, make_trainer):
    (tmp_path / "rows.py").write_text(
        "class Image: pass\ndef train():\n    return [{'messages': 'a', 'answer': Image(), (1, 2): 3}] * 40\n"
    )
    path = str(tmp_path / "rows.py")
    one, other = (set_up(PromptDataModule(path, val_ratio=0), make_trainer()).state_dict() for _ in range(2))
    assert one == other


def test_prompts_that_are_too_long_are_left_out_with_one_warning(tmp_path, make_trainer, chatml):
    rows = [{"messages": "a" * n, "answer": str(n)} for n in (1, 50, 2, 60)]
    limit = len(encode_prompt(chatml, [{"role": "user", "content": "a" * 10}]))
    module = PromptDataModule(write_rows(tmp_path, rows), max_prompt_length=limit, val_ratio=0)
    with pytest.warns(UserWarning, match=rf"2 of 4 prompts are longer than data.max_prompt_length={limit} tokens"):
        set_up(module, make_trainer())
    assert sorted(row["answer"] for row in module.draw(2)[0]) == ["1", "2"]
    module = PromptDataModule(write_rows(tmp_path, rows), max_prompt_length=2, val_ratio=0)
    with pytest.warns(UserWarning, match="4 of 4"), pytest.raises(ValueError, match="none of the 4 rows"):
        set_up(module, make_trainer())


def test_weights_of_a_mixture_scale_the_pass(tmp_path, make_trainer):
    first, second = write_rows(tmp_path, PROMPT_ROWS[:4], "a.jsonl"), write_rows(tmp_path, PROMPT_ROWS[4:], "b.jsonl")
    module = PromptDataModule([Source(first, 2.0), Source(second, 0.5)], prompts_per_rollout=1, val_ratio=0)
    assert len(set_up(module, make_trainer()).train_dataloader()) == 11  # 4 * 2 + 6 / 2
    passes = [[row["answer"] for row in module.draw(11)[0]] for _ in range(2)]
    for answers in passes:
        assert sorted(a for a in answers if int(a) < 4) == list("00112233")
        assert len({a for a in answers if int(a) >= 4}) == 3
    assert set(passes[0]) != set(passes[1])  # the half that is seen is drawn anew


PREFERENCES = [
    {"messages": "a", "chosen": "good", "rejected": "bad", "margin": 0.5},
    {"messages": "b", "chosen": "same", "rejected": "same", "margin": 1.0},
    {"messages": "c", "chosen": "good", "rejected": " ", "margin": 2.0},
]


def test_a_pair_without_a_margin_among_others_says_so(tmp_path, make_trainer):
    rows = [PREFERENCES[0], {"messages": "d", "chosen": "good", "rejected": "bad"}]
    module = set_up(PreferenceDataModule(write_rows(tmp_path, rows), batch_size=2, val_ratio=0), make_trainer())
    (batch,) = module.train_dataloader()
    assert sorted(str(x) for x in batch.sequences.margins.tolist()) == ["0.5", "0.5", "nan", "nan"]


def test_preferences_are_consecutive_pairs_and_useless_ones_are_counted(tmp_path, make_trainer, chatml):
    path = write_rows(tmp_path, PREFERENCES)
    module = set_up(PreferenceDataModule(path, batch_size=3, val_ratio=0), make_trainer())
    (batch,) = module.train_dataloader()
    header = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert [chatml.decode(ids) for ids in sequences(batch)] == [f"{header}good<|im_end|>", f"{header}bad<|im_end|>"]
    assert batch.sequences.labels.tolist() == [True, False]
    assert batch.sequences.margins.tolist() == [0.5, 0.5]
    assert len(set(batch.sequences.group_ids.tolist())) == 1
    assert batch.num_dropped == 2
    trained = batch.sequences.input_ids[batch.sequences.action_mask].tolist()
    assert chatml.decode(trained) == "good<|im_end|>bad<|im_end|>"
    cut = PreferenceDataModule(path, batch_size=3, max_length=len(chatml.encode(header)), val_ratio=0)
    (batch,) = set_up(cut, make_trainer()).train_dataloader()
    assert (batch.sequences, batch.num_dropped) == (None, 3)


def test_the_ways_to_write_a_preference_agree(tmp_path, make_trainer):
    user = {"role": "user", "content": "a"}
    good, bad = ({"role": "assistant", "content": text} for text in ("good", "bad"))
    ways = [
        {"messages": "a", "chosen": "good", "rejected": "bad"},
        {"messages": [user], "chosen": [good], "rejected": [bad]},
        {"messages": [user], "chosen": [user, good], "rejected": [user, bad]},
        {"chosen": [user, good], "rejected": [user, bad]},
    ]
    whole = {"prompt": "a", "messages": [user, good], "chosen": [user, good], "rejected": [user, bad]}
    named = [(way, "messages") for way in ways] + [(whole, None), (whole, "prompt")]
    found = []
    for i, (way, key) in enumerate(named):
        path = write_rows(tmp_path, [way], f"{i}.jsonl")
        module = PreferenceDataModule(path, batch_size=1, val_ratio=0, messages_key=key)
        set_up(module, make_trainer())
        (batch,) = module.train_dataloader()
        found.append((sequences(batch), batch.sequences.action_mask.tolist(), batch.rows[0]["messages"]))
        assert batch.sequences.margins is None
    assert all(way == found[0] for way in found)


def test_a_continuation_of_several_turns_trains_all_its_answers_and_only_those(tmp_path, make_trainer, chatml):
    prompt = chat_row("a", "b")["messages"] + [{"role": "user", "content": "c"}]
    chosen = [{"role": "assistant", "content": "d"}, *chat_row("e", "f")["messages"]]
    path = write_rows(tmp_path, [{"messages": prompt, "chosen": chosen, "rejected": "g"}])
    (batch,) = set_up(PreferenceDataModule(path, batch_size=1, val_ratio=0), make_trainer()).train_dataloader()
    trained = batch.sequences.input_ids[batch.sequences.action_mask].tolist()
    assert chatml.decode(trained) == "d<|im_end|>f<|im_end|>g<|im_end|>"


def whole_row(*replies, messages):
    """Two whole conversations, and `messages` that holds more than what they share."""
    chosen, rejected = (chat_row("a", reply)["messages"] for reply in replies)
    return {"prompt": "a", "messages": messages, "chosen": chosen, "rejected": rejected}


BAD_ROWS = [
    (
        ChatDataModule,
        [CHAT_ROWS[0], {"text": "a"}],
        r"row 1 of .*rows.jsonl: 'messages' is null or missing \(the row's keys: text",
    ),
    (ChatDataModule, [{"messages": "a"}], "row 0 of .*: the conversation must end with an assistant turn"),
    (
        ChatDataModule,
        [chat_row("a", 3)],
        r"row 0 of .*: message 1 of 'messages' \(assistant\) needs a string as content, not int",
    ),
    (PromptDataModule, [{"messages": "a"}], "row 0 of .*: no 'answer' .* data.answer_key .null where there are no"),
    (PromptDataModule, [chat_row("a", "b", answer="b")], "row 0 of .*: the prompt must end with a user, tool"),
    (PreferenceDataModule, [{**chat_row("a", "b"), "chosen": [], "rejected": "d"}], "row 0 of .*: the prompt must end"),
    (
        PreferenceDataModule,
        [{**chat_row("a", "b"), "chosen": "c", "rejected": "d"}],
        "row 0 of .*: the prompt must end with a user, tool or system turn, not with an assistant turn as column "
        "'messages' does; leave that turn out, or set data.messages_key to the column of the prompt alone",
    ),
    (
        PreferenceDataModule,
        [PREFERENCES[0], whole_row("good", "bad", messages=chat_row("a", "good")["messages"])],
        "row 1 of .*: column 'messages' already holds the answer of 'chosen'; set data.messages_key to null .the "
        "prompt is then what 'chosen' and 'rejected' share. or to the column of the prompt alone",
    ),
    (
        PreferenceDataModule,
        [whole_row("good", "bad", messages=chat_row("a", "bad")["messages"] + chat_row("b", "c")["messages"])],
        "row 0 of .*: column 'messages' already holds the answer of 'rejected'",
    ),
    (
        PreferenceDataModule,
        [whole_row("good", "bad", messages=chat_row("a", "else")["messages"])],
        "row 0 of .*: the prompt must end with a user, tool",
    ),
    (PreferenceDataModule, [{"messages": "a", "chosen": "b"}], "row 0 of .*: no 'rejected'"),
    (PreferenceDataModule, [{"messages": "a", "chosen": None, "rejected": "c"}], "row 0 of .*: 'chosen' is null or"),
    (PreferenceDataModule, [{"messages": "a", "chosen": 3, "rejected": "c"}], "row 0 of .*: 'chosen' must be a list"),
    (PreferenceDataModule, [{"messages": "a", "chosen": False, "rejected": "c"}], "'chosen' .*, not bool"),
    (PromptDataModule, [{"messages": 3, "answer": "b"}], "row 0 of .*: 'messages' must be a list"),
    (PreferenceDataModule, [{"chosen": "b", "rejected": "c"}], "row 0 of .*: no 'messages', and 'chosen' or"),
    (PreferenceDataModule, [{**PREFERENCES[0], "margin": "x"}], "row 0 of .*: 'margin' must be a number, not 'x'"),
]


@pytest.mark.parametrize(("module", "rows", "message"), BAD_ROWS)
def test_a_bad_row_is_named_in_setup(tmp_path, make_trainer, module, rows, message):
    with pytest.raises(ValueError, match=message):
        set_up(module(write_rows(tmp_path, rows), val_ratio=0), make_trainer())


def test_bad_settings_are_refused(tmp_path, make_trainer):
    path = write_rows(tmp_path, PROMPT_ROWS)
    with pytest.raises(ValueError, match="data.batch_size=0 must be at least 1"):
        ChatDataModule(path, batch_size=0)
    with pytest.raises(ValueError, match="data.max_length=1 must be at least 2"):
        ChatDataModule(path, max_length=1)
    with pytest.raises(ValueError, match="set both data.prompt_key='a' and data.response_key=None"):
        ChatDataModule(path, prompt_key="a")
    module = set_up(PromptDataModule(path, prompts_per_rollout=11, val_ratio=0), make_trainer(validating=True))
    with pytest.raises(ValueError, match="data.prompts_per_rollout=11 is larger than the 10 training prompts"):
        module.train_dataloader()
    with pytest.raises(ValueError, match="no held-out rows: set data.val_path or data.val_ratio"):
        module.val_dataloader()
    trainer = make_trainer()
    trainer.overfit_batches = 2
    with pytest.raises(ValueError, match="overfit_batches=2 has no effect"):
        set_up(PromptDataModule(path), trainer)


def test_a_template_that_fails_does_so_in_setup(tmp_path, make_trainer, chatml):
    chatml.save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    module = ChatDataModule(write_rows(tmp_path, CHAT_ROWS))
    with pytest.raises(ValueError, match="row 0 of .*: the chat template refuses a conversation of user: no"):
        set_up(module, make_trainer(tokenizer=str(tmp_path / "broken")))


def test_batches_stay_in_host_memory_as_they_are(tmp_path, make_trainer):
    module = set_up(ChatDataModule(write_rows(tmp_path, CHAT_ROWS), batch_size=2), make_trainer())
    batch = next(iter(module.train_dataloader()))
    assert module.transfer_batch_to_device(batch, torch.device("meta"), 0) is batch
    assert not batch.sequences.input_ids.is_meta
    assert module.transfer_batch_to_device(torch.zeros(1), torch.device("meta"), 0).is_meta


def test_the_quickstart_holds_out_the_same_problems_in_both_data_sets(make_trainer):
    script = REPO / "configs/quickstart/arithmetic.py"
    chat = ChatDataModule(f"conversations@{script}", batch_size=500, val_ratio=0.05)
    prompts = PromptDataModule(f"prompts@{script}", val_batch_size=500, val_ratio=0.05)
    (chat_batch,) = set_up(chat, make_trainer()).val_dataloader()
    (prompt_batch,) = set_up(prompts, make_trainer()).val_dataloader()
    assert chat_batch.rows == prompt_batch.rows
    assert len({row["messages"][0]["content"] for row in prompt_batch.rows}) == 500
    assert len(chat.train_split) == len(prompts.train_split) == 9_500
    row = prompts.train_split.rows[3_758]
    assert (row["messages"][0]["content"], row["answer"]) == ("37+58=", "95")
