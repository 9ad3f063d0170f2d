from __future__ import annotations

import threading

import pytest
from transformers import AutoTokenizer

from rl2lightning.rewards.base import score
from rl2lightning.rewards.remote import ClassifyReward, RemoteReward
from rl2lightning.service import ServiceError
from rl2lightning.types import Trajectory

MESSAGES = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]


def trajectory(**row) -> Trajectory:
    return Trajectory(row=row, group_id=0, messages=[dict(message) for message in MESSAGES])


def test_the_conversation_and_columns_are_sent_and_a_number_comes_back(fake_service):
    answers = iter([{"reward": 0.5, "other": 1}, 2])
    service = fake_service(lambda payload, headers: (200, next(answers)))
    reward = RemoteReward(service.url, columns=["answer", "level"])
    assert reward(trajectory(answer="4")) == 0.5
    assert reward(trajectory(answer="4")) == 2
    assert service.payloads[0] == {"messages": MESSAGES, "response": "4", "answer": "4", "level": None}


def test_another_key_may_hold_the_reward(fake_service):
    service = fake_service(lambda payload, headers: (200, {"score": 3}))
    assert RemoteReward(service.url, key="score")(trajectory()) == 3
    with pytest.raises(ServiceError, match="answered without a reward: {'score': 3}"):
        RemoteReward(service.url)(trajectory())


def test_a_classifier_is_asked_as_vllm_is(fake_service):
    answer = {"object": "list", "data": [{"index": 0, "label": "LABEL_0", "probs": [0.25, 0.75], "num_classes": 2}]}
    service = fake_service(lambda payload, headers: (200, answer))
    assert ClassifyReward(service.url)(trajectory()) == 0.25
    assert ClassifyReward(service.url, model="rm", label=1)(trajectory()) == 0.75
    assert service.payloads == [{"messages": MESSAGES}, {"model": "rm", "messages": MESSAGES}]
    with pytest.raises(ServiceError, match="answered without a reward"):
        ClassifyReward(service.url, label=2)(trajectory())


def test_a_classifier_gets_tokens_where_a_tokenizer_renders_them(fake_service, tiny_model):
    service = fake_service(lambda payload, headers: (200, {"data": [{"probs": [1.5]}]}))
    assert ClassifyReward(service.url, tokenizer=tiny_model)(trajectory()) == 1.5
    tokens = AutoTokenizer.from_pretrained(tiny_model).encode("<|user|>2+2<|end|><|assistant|>4<|end|>")
    assert service.payloads == [{"input": tokens}]


def test_a_server_down_then_back_costs_time_and_no_reward(fake_service):
    service = fake_service(lambda payload, headers: (200, 1.0))
    service.down()
    threading.Timer(0.3, service.up).start()
    reward = RemoteReward(service.url, retries=8, backoff=0.05)
    scored = score(trajectory(), [reward], on_error="error")
    assert (scored.scores, scored.errors) == ({"remote": 1.0}, {})


def test_a_server_that_stays_down_is_counted_by_policy(fake_service):
    service = fake_service(lambda payload, headers: (200, 1.0))
    service.down()
    reward = RemoteReward(service.url, retries=1, backoff=0.01)
    zero = score(trajectory(), [reward], on_error="zero")
    assert (zero.scores, zero.errors, zero.dropped) == ({"remote": 0.0}, {"remote/raised_ServiceError": 1}, False)
    assert score(trajectory(), [reward], on_error="drop").dropped
    with pytest.raises(ValueError, match=r"reward 'remote' raised ServiceError: .*gave no answer in 2 attempts"):
        score(trajectory(), [reward], on_error="error")
    service.up()
    assert score(trajectory(), [reward], on_error="error").scores == {"remote": 1.0}


@pytest.mark.parametrize("answer", [{"reward": None}, {"reward": "high"}, None])
def test_an_answer_that_is_no_number_is_a_failure_too(fake_service, answer):
    service = fake_service(lambda payload, headers: (200, answer))
    scored = score(trajectory(), [RemoteReward(service.url)], on_error="zero")
    assert scored.errors.total() == 1


def test_columns_do_not_shadow_what_is_sent_anyway():
    with pytest.raises(ValueError, match="'response' is sent anyway"):
        RemoteReward("http://127.0.0.1:1/", columns=["response"])
