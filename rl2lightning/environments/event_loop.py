"""Runs coroutines for code that is not asynchronous, and functions that may not come to an end."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class EventLoop:
    """One thread with an event loop, begun at the first coroutine and ended when its owner is no more.

    All coroutines share it, so clients that live in a loop (HTTP sessions, say) can be kept between calls.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout: float | None = None) -> Any:
        """What the coroutine returns; called from any thread but the loop's own.

        Raises:
            TimeoutError: it took longer than `timeout` seconds, and was cancelled.
        """
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run_forever, args=(self._loop,), name="event-loop", daemon=True).start()
                weakref.finalize(self, self._loop.call_soon_threadsafe, self._loop.stop)
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise


def _run_forever(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
    finally:
        loop.close()


class Abandoner:
    """Runs functions in threads of their own and leaves those behind that do not return in time.

    A thread cannot be stopped: one that hangs is counted until it ends, and with too many of them nothing new begins.

    Args:
        max_abandoned: most threads left behind at a time.
    """

    def __init__(self, max_abandoned: int = 64) -> None:
        self.max_abandoned = max_abandoned
        self._abandoned: list[threading.Thread] = []
        self._lock = threading.Lock()

    def run(self, function: Callable[[], Any], timeout: float, name: str) -> Any:
        """What the function returns, or its exception (also SystemExit and its kind, as a RuntimeError).

        Raises:
            TimeoutError: it did not return within `timeout` seconds, or too many others have not returned at all.
        """
        with self._lock:
            self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
            if len(self._abandoned) >= self.max_abandoned:
                raise TimeoutError(f"{self.max_abandoned} earlier calls still hang: none is begun before one ends")
        outcome: Future[Any] = Future()
        thread = threading.Thread(target=_settle, args=(outcome, function), name=name, daemon=True)
        thread.start()
        try:
            return outcome.result(timeout)
        except TimeoutError:
            if not outcome.done():
                with self._lock:
                    self._abandoned.append(thread)
                raise TimeoutError(f"no result within {timeout:g} s") from None
            raise


def _settle(outcome: Future[Any], function: Callable[[], Any]) -> None:
    try:
        outcome.set_result(function())
    except Exception as error:
        outcome.set_exception(error)
    except BaseException as error:  # sys.exit() in a tool ends the tool, not its caller
        outcome.set_exception(RuntimeError(f"it raised {type(error).__name__}: {error}"))
