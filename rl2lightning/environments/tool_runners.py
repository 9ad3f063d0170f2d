"""Where tools run: threads of this process, or processes of their own. Both are bounded, and neither waits for ever."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from queue import LifoQueue
from typing import TYPE_CHECKING, Any

from rl2lightning.environments.event_loop import Abandoner, EventLoop
from rl2lightning.environments.tool_worker import as_text

if TYPE_CHECKING:
    from rl2lightning.environments.tools import Tool

_START_SECONDS = 60.0  # for a worker to begin and to import the tool's file


class ToolFailed(Exception):
    """A tool gave no result; `cause` is `raised`, `timeout` or `garbage`."""

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class ToolRunner(ABC):
    """Calls tools, some at a time. Called from several threads."""

    def check(self, tool: Tool) -> None:  # noqa: B027 - most runners take any tool
        """Raises ValueError for a tool that this runner cannot call."""

    @abstractmethod
    def run(self, tool: Tool, arguments: dict[str, Any], *, max_chars: int) -> str:
        """The result as text. `tool.timeout` counts from when the call begins, not from when it queues.

        Raises:
            ToolFailed: the tool raised, did not return in time, or returned what has no text.
        """


class ThreadRunner(ToolRunner):
    """Tools share the training process: they see its memory and its secrets, and one that hangs leaves its thread
    behind (counted, and bounded). `async def` tools share one event loop and are cancelled when their time is over.

    Args:
        num_workers: tools that run at a time.
        max_abandoned: most threads left behind; with more, calls fail at once until one of them ends.
    """

    def __init__(self, num_workers: int = 32, max_abandoned: int = 64) -> None:
        if num_workers < 1:
            raise ValueError(f"runner.num_workers={num_workers} must be at least 1")
        self._slots = threading.BoundedSemaphore(num_workers)
        self._threads, self._loop = Abandoner(max_abandoned), EventLoop()

    def run(self, tool: Tool, arguments: dict[str, Any], *, max_chars: int) -> str:
        with self._slots:
            try:
                if tool.is_async:
                    value = self._loop.run(tool(arguments), tool.timeout)
                else:
                    value = self._threads.run(partial(tool, arguments), tool.timeout, f"tool-{tool.name}")
            except TimeoutError as error:
                raise ToolFailed("timeout", str(error) or f"no result within {tool.timeout:g} s") from error
            except Exception as error:
                raise ToolFailed("raised", f"{type(error).__name__}: {error}") from error
        try:
            return as_text(value, max_chars)
        except (TypeError, ValueError) as error:
            raise ToolFailed("garbage", str(error)) from error


class ProcessRunner(ToolRunner):
    """Functions run in worker processes, which are killed with their children when a call takes too long, and replaced.

    A worker imports the function by its path, so tools must be given by one. It is no sandbox: it runs as you, with
    your files and environment variables. Tools that need no process of ours (`isolated`) run in threads all the same.

    Args:
        num_workers: processes, begun as they are needed.
    """

    def __init__(self, num_workers: int = 8) -> None:
        if num_workers < 1:
            raise ValueError(f"runner.num_workers={num_workers} must be at least 1")
        self._threads = ThreadRunner(num_workers)
        self._idle: LifoQueue[_Worker] = LifoQueue()
        workers = [_Worker() for _ in range(num_workers)]
        for worker in workers:
            self._idle.put(worker)
        weakref.finalize(self, lambda: [worker.kill() for worker in workers])

    def check(self, tool: Tool) -> None:
        if tool.target is None and not tool.isolated:
            raise ValueError(
                f"tool '{tool.name}' must be given by its import path to run in a process (or use threads)"
            )

    def run(self, tool: Tool, arguments: dict[str, Any], *, max_chars: int) -> str:
        if tool.isolated:
            return self._threads.run(tool, arguments, max_chars=max_chars)
        worker = self._idle.get()
        try:
            request = {"target": tool.target, "arguments": arguments, "max_chars": max_chars}
            return worker.call(request, tool.timeout)
        finally:
            self._idle.put(worker)


class _Worker:
    """A process that calls one function at a time; none until it is needed, or after it was killed."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.loaded: set[str] = set()
        self.buffer = b""

    def call(self, request: dict[str, Any], timeout: float) -> str:
        target = request["target"]
        if self.process is None or self.process.poll() is not None:
            self._start()
        if target not in self.loaded:
            self._ask({"target": target}, _START_SECONDS)
            self.loaded.add(target)
        return self._ask(request, timeout)

    def _start(self) -> None:
        self.kill()
        script = Path(__file__).with_name("tool_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._send({"path": sys.path})

    def _send(self, message: dict[str, Any]) -> None:
        assert self.process is not None and self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died; the answer that does not come will say so
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def _ask(self, message: dict[str, Any], timeout: float) -> str:
        self._send(message)
        line = self._line(time.monotonic() + timeout)
        if line is None:
            self.kill()
            raise ToolFailed("timeout", f"no result within {timeout:g} s")
        if not line:
            code = self.process.wait() if self.process is not None else None
            self.kill()
            raise ToolFailed("raised", f"its process ended with code {code}")
        answer = json.loads(line)
        if "cause" in answer:
            raise ToolFailed(answer["cause"], answer["message"])
        return answer["text"]

    def _line(self, deadline: float) -> bytes | None:
        """The next line; b"" where the process has ended, None where it came too late."""
        assert self.process is not None and self.process.stdout is not None
        poll = select.poll()  # select() itself takes no file descriptor above 1023
        poll.register(self.process.stdout)
        while b"\n" not in self.buffer:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                return None
            chunk = os.read(self.process.stdout.fileno(), 1 << 16)
            if not chunk:
                return b""
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        return line

    def kill(self) -> None:
        process, self.process = self.process, None
        self.loaded, self.buffer = set(), b""
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
