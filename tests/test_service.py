from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl2lightning.service import Service, ServiceError


def client(url: str, **changes) -> Service:
    settings = {"timeout": 5.0, "retries": 0, "backoff": 0.01, "concurrency": 4, "token_env": None}
    return Service(url, setting="test", **{**settings, **changes})


def test_json_goes_and_json_comes(fake_service):
    service = fake_service(lambda payload, headers: (200, {"got": payload}))
    assert client(service.url).post({"a": ["ä"]}) == {"got": {"a": ["ä"]}}


def test_a_server_that_is_down_and_comes_back_is_waited_for(fake_service):
    service = fake_service(lambda payload, headers: (200, "here"))
    service.down()
    threading.Timer(0.3, service.up).start()
    assert client(service.url, retries=50, backoff=0.05, max_backoff=0.1).post(1) == "here"


def test_failures_that_may_pass_are_said_once_a_minute(fake_service, caplog, monkeypatch):
    monkeypatch.setattr("rl2lightning.service._SILENCE", 0.3)
    statuses = iter([503, 200, 429, 200, 503, 200])
    service = fake_service(lambda payload, headers: (next(statuses), "here"))
    asking = client(service.url, retries=2)
    assert [asking.post(1) for _ in range(2)] == ["here"] * 2
    assert [r.message for r in caplog.records] == [f'{service.url}: status 503: "here"; trying again, 2 times at most']
    time.sleep(0.35)
    assert asking.post(1) == "here"
    assert len(caplog.records) == 2


def test_a_server_that_stays_down_is_an_error_after_all_attempts(fake_service):
    service = fake_service(lambda payload, headers: (200, "here"))
    service.down()
    begin = time.monotonic()
    with pytest.raises(ServiceError, match=r"127.0.0.1:\d+/ask gave no answer in 3 attempts: .*refused"):
        client(service.url, retries=2, backoff=0.1).post(1)
    assert time.monotonic() - begin > 0.75 * (0.1 + 0.2)  # twice as long each time, a quarter less at most


@pytest.mark.parametrize("status", [500, 503, 429, 408])
def test_what_may_pass_is_tried_again(fake_service, status):
    answers = iter([(status, "busy"), (status, "busy"), (200, 7)])
    service = fake_service(lambda payload, headers: next(answers))
    assert client(service.url, retries=2).post("x") == 7
    assert service.payloads == ["x"] * 3


def test_what_is_refused_is_not_tried_again(fake_service):
    service = fake_service(lambda payload, headers: (404, {"detail": "no such model"}))
    with pytest.raises(ServiceError, match="refused the request, status 404: .*no such model"):
        client(service.url, retries=5).post(1)
    assert len(service.payloads) == 1


def test_a_server_that_does_not_answer_is_a_time_out(fake_service):
    gate = threading.Event()
    service = fake_service(lambda payload, headers: (200, gate.wait(30)))
    with pytest.raises(ServiceError, match="no answer in 2 attempts: .*timed out"):
        client(service.url, retries=1, timeout=0.2).post(1)
    gate.set()


def test_a_connection_that_breaks_off_is_tried_again():
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=lambda: [server.accept()[0].close() for _ in range(2)], daemon=True).start()
        with pytest.raises(ServiceError, match="no answer in 2 attempts"):
            client(f"http://127.0.0.1:{server.getsockname()[1]}/", retries=1, timeout=5).post(1)


def test_what_is_no_json_is_an_error(fake_service):
    service = fake_service(lambda payload, headers: (200, b"<html>"))
    with pytest.raises(ServiceError, match="did not answer in JSON: b'<html>'"):
        client(service.url).post(1)


def test_redirects_are_not_followed(fake_service):
    elsewhere = fake_service(lambda payload, headers: (200, "secret"))
    service = fake_service(lambda payload, headers: (302, elsewhere.url))
    with pytest.raises(ServiceError, match="status 302"):
        client(service.url).post(1)
    assert elsewhere.payloads == []


def test_no_more_requests_run_at_a_time_than_are_allowed(fake_service):
    running, most, lock = [], [], threading.Lock()

    def answer(payload, headers):
        with lock:
            running.append(payload)
            most.append(len(running))
        time.sleep(0.03)
        with lock:
            running.pop()
        return 200, payload

    service = client(fake_service(answer).url, concurrency=2)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(service.post, range(8))) == list(range(8))
    assert max(most) == 2


def test_a_token_comes_from_the_environment_and_not_from_the_config(fake_service, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "abc")
    service = fake_service(lambda payload, headers: (200, headers.get("Authorization")))
    assert client(service.url, token_env="MY_TOKEN").post(1) == "Bearer abc"
    assert client(service.url).post(1) is None
    monkeypatch.delenv("MY_TOKEN")
    with pytest.raises(ValueError, match="test.token_env='MY_TOKEN': no such environment variable"):
        client(service.url, token_env="MY_TOKEN")


def test_proxies_of_the_environment_are_not_used(fake_service, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    service = fake_service(lambda payload, headers: (200, "direct"))
    assert client(service.url).post(1) == "direct"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "file:///etc/passwd"}, "test.url='file:///etc/passwd' must be an http"),
        ({"url": "localhost:8000"}, "must be an http"),
        ({"timeout": 0}, "test.timeout=0 must be positive"),
        ({"concurrency": 0}, "test.concurrency=0 must be positive"),
        ({"retries": -1}, "test.retries=-1 must not be negative"),
    ],
)
def test_a_senseless_setting_is_said_at_once(changes, message):
    with pytest.raises(ValueError, match=message):
        client(**{"url": "http://127.0.0.1:1/", **changes})
