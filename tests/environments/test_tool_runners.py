from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rl2lightning.environments.tool_runners import ProcessRunner, ThreadRunner, ToolFailed
from rl2lightning.environments.tools import FunctionTool

TOOLS = """
import asyncio, os, subprocess, sys, time

def double(x: int):
    print("this is no answer")
    return 2 * x

async def slow_double(x: int):
    await asyncio.sleep(0.05)
    return 2 * x

def broken(x: int):
    raise KeyError("no such thing")

def hang(x: int):
    time.sleep(600)

async def hang_async(x: int):
    await asyncio.sleep(600)

def quits(x: int):
    sys.exit(3)

def dies(x: int):
    os._exit(3)

def garbage(x: int):
    return object()

def nothing(x: int):
    return None

def long(x: int):
    return "a" * x

def table(x: int):
    return {"rows": [x, 2.5, True], "name": "ä"}

def surrogate(x: int):
    return "\\ud800"

def pid(x: int):
    return os.getpid()

def child(x: int):
    print(subprocess.Popen(["sleep", "600"]).pid, file=open(os.environ["CHILD_FILE"], "w"))
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    return str(file)


@pytest.fixture(scope="module", params=["threads", "processes"])
def run(request, path):
    runner = ThreadRunner(4) if request.param == "threads" else ProcessRunner(2)

    def call(name: str, x: int = 1, timeout: float = 20.0, max_chars: int = 1000) -> str:
        return runner.run(FunctionTool(f"{path}:{name}", timeout=timeout), {"x": x}, max_chars=max_chars)

    return call


def test_results_become_text(run):
    assert run("double", 21) == "42"
    assert run("slow_double", 4) == "8"
    assert run("table", 3) == '{"rows": [3, 2.5, true], "name": "ä"}'
    assert run("nothing") == "null"
    assert run("long", 12, max_chars=10) == "aaaaaaaaaa… (2 more characters)"
    assert run("surrogate").encode() == b"?"


@pytest.mark.parametrize(
    ("name", "cause", "message"),
    [
        ("broken", "raised", "KeyError: 'no such thing'"),
        ("hang", "timeout", "no result within 0.3 s"),
        ("hang_async", "timeout", "no result within 0.3 s"),
        ("quits", "raised", "3"),
        ("garbage", "garbage", "it returned object"),
    ],
)
def test_a_tool_that_fails_says_how_and_leaves_the_runner_whole(run, name, cause, message):
    with pytest.raises(ToolFailed, match=message) as failed:
        run(name, timeout=0.3 if cause == "timeout" else 20.0)
    assert failed.value.cause == cause
    assert run("double", 3) == "6"


def test_a_tool_that_kills_its_process_ends_that_call_only(path):
    runner = ProcessRunner(1)
    with pytest.raises(ToolFailed, match="its process ended with code 3"):
        runner.run(FunctionTool(f"{path}:dies"), {"x": 1}, max_chars=10)
    pids = {runner.run(FunctionTool(f"{path}:pid"), {"x": 1}, max_chars=10) for _ in range(3)}
    assert len(pids) == 1  # the new worker is kept
    assert pids != {str(os.getpid())}


def test_a_hanging_process_is_killed_with_its_children(path, tmp_path, monkeypatch):
    monkeypatch.setenv("CHILD_FILE", str(tmp_path / "pid"))
    with pytest.raises(ToolFailed, match="no result"):
        ProcessRunner(1).run(FunctionTool(f"{path}:child", timeout=1.0), {"x": 1}, max_chars=10)
    pid = int((tmp_path / "pid").read_text())
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _alive(pid):
        time.sleep(0.02)
    assert not _alive(pid)


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_with_their_runner(path):
    runner = ProcessRunner(1)
    pid = int(runner.run(FunctionTool(f"{path}:pid"), {"x": 1}, max_chars=10))
    assert _alive(pid)
    del runner
    assert not _alive(pid)


def test_a_process_needs_an_import_path():
    def here(x: int) -> int:
        return x

    with pytest.raises(ValueError, match="tool 'here' must be given by its import path to run in a process"):
        ProcessRunner(1).check(FunctionTool(here))


def test_no_more_tools_run_at_a_time_than_there_are_workers():
    running, most = [], []

    def busy(x: int) -> int:
        running.append(x)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return x

    runner, tool = ThreadRunner(3), FunctionTool(busy)
    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(lambda x: runner.run(tool, {"x": x}, max_chars=10), range(12)))
    assert results == [str(x) for x in range(12)]
    assert max(most) == 3


def test_threads_left_behind_are_bounded_and_free_again_once_they_end():
    gate = threading.Event()

    def wait(x: int) -> int:
        gate.wait(30)
        return x

    runner, tool = ThreadRunner(1, max_abandoned=2), FunctionTool(wait, timeout=0.05)
    messages = []
    for _ in range(3):  # one worker: a thread left behind does not block the next call
        with pytest.raises(ToolFailed) as failed:
            runner.run(tool, {"x": 1}, max_chars=10)
        messages.append(str(failed.value))
    assert messages[:2] == ["no result within 0.05 s"] * 2
    assert messages[2].startswith("2 earlier calls still hang")
    gate.set()
    deadline = time.monotonic() + 10
    while any(thread.name == "tool-wait" for thread in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert runner.run(FunctionTool(wait), {"x": 7}, max_chars=10) == "7"


def test_async_tools_share_an_event_loop_and_are_cancelled_when_late():
    loops, cancelled = set(), []

    async def note(x: int) -> int:
        loops.add(id(asyncio.get_running_loop()))
        try:
            await asyncio.sleep(x)
        except asyncio.CancelledError:
            cancelled.append(x)
            raise
        return x

    runner = ThreadRunner(4)
    assert runner.run(FunctionTool(note), {"x": 0}, max_chars=10) == "0"
    with pytest.raises(ToolFailed, match="no result within 0.1 s"):
        runner.run(FunctionTool(note, timeout=0.1), {"x": 600}, max_chars=10)
    assert runner.run(FunctionTool(note), {"x": 0}, max_chars=10) == "0"
    assert len(loops) == 1
    assert cancelled == [600]


@pytest.mark.parametrize("runner", [ThreadRunner, ProcessRunner])
def test_a_runner_needs_a_worker(runner):
    with pytest.raises(ValueError, match="runner.num_workers=0 must be at least 1"):
        runner(0)
