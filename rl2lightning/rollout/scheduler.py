"""Runs generators that want tokens and calls: the engine is stepped for all at once, calls go to a pool of threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any

from rl2lightning.rollout.engine import RolloutEngine
from rl2lightning.types import Completion, SamplingParams


@dataclass(frozen=True)
class Generate:
    """Yielded for a completion of `prompt_ids`; resumed with the `Completion`.

    Args:
        begun: so many tokens at the end of the prompt are the completion's, see `RolloutEngine.submit`.
        max_new_tokens: most tokens besides those, if fewer than the sampling allows.
        may_be_cut: whether it is aborted when the rollout ends early.
    """

    prompt_ids: list[int]
    seed: int
    begun: int = 0
    max_new_tokens: int | None = None
    may_be_cut: bool = False


class Call:
    """Yielded to run a function in a thread; resumed with what it returns, or its exception raised at the yield."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args


Outcome = tuple[int, Any, Exception | None]  # task, value, or else what was raised

_PATIENCE = 1.0  # seconds


class Scheduler:
    """Plain threads and generators rather than asyncio: works where an event loop is running already (notebooks), and
    a task costs next to nothing.

    Args:
        num_workers: threads.
    """

    def __init__(self, engine: RolloutEngine, sampling: SamplingParams, *, num_workers: int) -> None:
        self.engine, self.sampling, self.num_workers = engine, sampling, num_workers

    def run(
        self,
        tasks: Sequence[Generator[Any, Any, Any]],
        tick: Callable[[int], None],
        enough: Callable[[], bool] = lambda: False,
    ) -> list[Any]:
        """What each task returns, in order.

        Args:
            tick: called with the number of finished tasks after every round.
            enough: asked after every round; once it says so, requests that may be cut are aborted and no more of them
                made, so tasks get completions with finish reason "abort". Calls that have begun are waited for.

        Raises:
            Whatever a task lets through, and whatever the engine raises. Requests are aborted and threads joined on
            the way out; that waits for calls that have begun.
        """
        if self.engine.unfinished:
            raise RuntimeError(f"the engine has {self.engine.unfinished} unfinished requests; abort them first")
        self.tasks = tasks
        self.results: dict[int, Any] = {}
        self.requests: dict[str, int] = {}  # running request -> task
        self.cuttable: set[str] = set()  # those of the running requests that may be cut
        self.cut = False
        self.num_requests = self.num_calls = 0
        self.outcomes: SimpleQueue[Future[list[Outcome]]] = SimpleQueue()
        # leaving the pool waits for its threads, after the rest was cleaned up
        with ThreadPoolExecutor(self.num_workers, thread_name_prefix="rollout") as self.pool:
            try:
                self._loop(tick, enough)
            finally:
                self.pool.shutdown(wait=False, cancel_futures=True)
                for task in tasks:
                    task.close()
                self.engine.abort(list(self.requests))
        return [self.results[i] for i in range(len(tasks))]

    def _loop(self, tick: Callable[[int], None], enough: Callable[[], bool]) -> None:
        ready = self._begin()
        tick(len(self.results))
        while ready or self.requests or self.num_calls:
            self._resume(ready)
            ready = []
            if self.requests:
                ready += self._ended(self.engine.step())
            # with nothing to generate there is only waiting for a call to return
            while self.num_calls and (not self.outcomes.empty() or not (ready or self.requests)):
                ready += self._returned()
            if not self.cut and enough():
                self.cut = True
                ready += self._ended(self.engine.abort(sorted(self.cuttable)))
            tick(len(self.results))

    def _begin(self) -> list[Outcome]:
        """Starts all tasks; what the calls return that they begin with, in the order of the tasks.

        Where threads are fast, the engine then gets all first requests at once, whichever thread was the fastest: the
        last bits of log-probs depend on how requests are batched. Calls that take long are not waited for.
        """
        self._resume([(i, None, None) for i in range(len(self.tasks))])
        outcomes: list[Outcome] = []
        deadline = time.monotonic() + _PATIENCE
        while self.num_calls and (left := deadline - time.monotonic()) > 0:
            try:
                outcomes += self._returned(timeout=left)
            except Empty:
                break
        return sorted(outcomes, key=lambda outcome: outcome[0])

    def _ended(self, completions: list[Completion]) -> list[Outcome]:
        self.cuttable.difference_update(completion.request_id for completion in completions)
        return [(self.requests.pop(completion.request_id), completion, None) for completion in completions]

    def _advance(self, task: int, value: Any, error: Exception | None) -> Call | None:
        """Resumes a task; returns the call it wants, if it is that."""
        try:
            wanted = self.tasks[task].send(value) if error is None else self.tasks[task].throw(error)
        except StopIteration as stop:
            self.results[task] = stop.value
            return None
        if isinstance(wanted, Call):
            return wanted
        self.num_requests += 1
        request_id = f"{task}/{self.num_requests}"
        if self.cut and wanted.may_be_cut:
            return self._advance(task, Completion(request_id, wanted.prompt_ids, [], [], "abort"), None)
        sampling = self.sampling
        if wanted.max_new_tokens is not None:
            most = min(sampling.max_tokens, wanted.begun + wanted.max_new_tokens)
            sampling = replace(sampling, max_tokens=most, min_tokens=min(most, sampling.min_tokens))
        self.engine.submit(request_id, wanted.prompt_ids, sampling, seed=wanted.seed, begun=wanted.begun)
        self.requests[request_id] = task
        if wanted.may_be_cut:
            self.cuttable.add(request_id)
        return None

    def _resume(self, outcomes: list[Outcome]) -> None:
        """Resumes tasks, and starts the calls that they want."""
        self._start([(o[0], call) for o in outcomes if (call := self._advance(*o)) is not None])

    def _returned(self, timeout: float | None = None) -> list[Outcome]:
        """What the calls returned that a thread made one after another; raises Empty if none does in time."""
        outcomes = self.outcomes.get(timeout=timeout).result()
        self.num_calls -= len(outcomes)
        return outcomes

    def _start(self, calls: list[tuple[int, Call]]) -> None:
        """Hands calls to the threads, several at a time where there are many: most are far cheaper than a hand-over."""
        size = max(1, len(calls) // (4 * self.num_workers))
        for i in range(0, len(calls), size):
            self.num_calls += len(calls[i : i + size])
            self.pool.submit(_run_calls, calls[i : i + size]).add_done_callback(self.outcomes.put)


def _run_calls(calls: list[tuple[int, Call]]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for task, call in calls:
        try:
            outcomes.append((task, call.function(*call.args), None))
        except Exception as error:
            outcomes.append((task, None, error))
    return outcomes
