"""`CheckpointWriter`: all processes write a checkpoint together, at once or while training goes on."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from rl2lightning.parallel.checkpoint import CheckpointError, beside, delete, link, remove, replace, rng_state, tidy


class CheckpointWriter:
    """Writes, links and removes the checkpoints of a run; every process has one and calls it at the same places.

    What is written is complete under its name or absent: it is made beside it and renamed when every process has done
    its part. Where one fails, all raise `CheckpointError` with the cause, and what was there before is untouched.

    Args:
        background: return as soon as the state is copied to host memory, and write it in a thread. One write at a time:
            the next `save` waits for it, and raises what it failed with. Links and removals wait their turn behind it
            and are left out if it fails, so that there is a complete checkpoint at any time.
        timeout: how long processes wait for one another.
    """

    def __init__(self, *, background: bool, timeout: timedelta | None) -> None:
        # a group of its own: what a write in the background sends must not come between the collectives of training
        group = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(group, dist.ProcessGroup)
        self.group = group
        self.rank = dist.get_rank()
        self.newest: Path | None = None  # written completely, by this writer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint") if background else None
        self._pending: Future[None] | None = None
        self._afterwards: list[Future[None]] = []

    def save(self, checkpoint: dict[str, Any], path: Path, *, files: Callable[[Path], None]) -> None:
        """Writes Lightning's `checkpoint` to `path`; `files` adds the model's own. A collective, errors included."""
        self.wait()
        state = {"state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{i}": x for i, x in enumerate(checkpoint.pop("optimizer_states", []))}
        small: dict[str, bytes] = {}

        def snapshot() -> None:
            nonlocal state
            small[f"rank_{self.rank:05d}.pt"] = _plain_bytes(rng_state(), "random states")
            if self.rank == 0:
                small["meta.pt"] = _plain_bytes(checkpoint, "loops, callbacks, schedulers and data")
            if self._thread is not None:
                state = _in_host_memory(state)

        self._together(path, snapshot)
        if self._thread is None:
            self._write(path, state, small, files)
        else:
            self._pending = self._thread.submit(self._write, path, state, small, files)

    def link(self, target: Path, name: Path) -> None:
        """Points the symbolic link `name` at `target`, once that is complete."""
        if self.rank == 0:
            self._after_pending(lambda: link(target, name))

    def remove(self, path: Path) -> None:
        """Removes a checkpoint, not before a newer one is complete."""
        if self.rank == 0:
            self._after_pending(lambda: remove(path, successor=self.newest))

    def wait(self) -> None:
        """Returns when nothing is being written; raises what the last write failed with, once, on every process."""
        pending, self._pending = self._pending, None
        afterwards, self._afterwards = self._afterwards, []
        for job in (pending, *afterwards):
            if job is not None:
                job.result()

    def close(self) -> None:
        """Waits, then gives thread and group back."""
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()
            if dist.is_initialized():
                dist.destroy_process_group(self.group)

    def _after_pending(self, job: Callable[[], None]) -> None:
        pending = self._pending
        if pending is None:
            job()
            return
        assert self._thread is not None  # which takes one job after the other

        def unless_failed() -> None:
            if pending.exception() is None:
                job()

        self._afterwards.append(self._thread.submit(unless_failed))

    def _write(self, path: Path, state: dict[str, Any], small: dict[str, bytes], files: Callable[[Path], None]) -> None:
        partial = beside(path, "incomplete")

        def prepare() -> None:
            if self.rank == 0:
                path.parent.mkdir(parents=True, exist_ok=True)
                tidy(path.parent)
                delete(partial)
                partial.mkdir()

        def write_small() -> None:
            for name, content in small.items():
                with (partial / name).open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            if self.rank == 0:
                files(partial / "model")

        def write_shards() -> None:
            dcp.save(state, checkpoint_id=str(partial / "dcp"), process_group=self.group)

        def commit() -> None:
            if self.rank == 0:
                replace(partial, path)

        try:
            for part in (prepare, write_small, write_shards, commit):
                self._together(path, part)
        except CheckpointError:
            if self.rank == 0:
                delete(partial)  # on a full disk that is what makes room
            raise
        self.newest = path

    def _together(self, path: Path, fn: Callable[[], None]) -> None:
        """Runs fn on every process; where it fails on one, all raise, instead of waiting for it in vain."""
        cause: BaseException | None = None
        try:
            fn()
        except (Exception, CheckpointException) as error:  # the second is torch's, and no Exception
            cause = error
        told: list[tuple[int, str] | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(told, None if cause is None else _in_words(cause, self.rank), group=self.group)
        failed = [x for x in told if x is not None]
        if failed:
            rank, words = failed[0]
            raise CheckpointError(f"checkpoint '{path}' was not written: {words} (process {rank})") from cause


def _in_words(error: BaseException, rank: int) -> tuple[int, str]:
    """The process that failed, which may be another than `rank`, that noticed; and what happened there."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
    return rank, f"{type(error).__name__}: {error}"


def _in_host_memory(state: dict[str, Any]) -> dict[str, Any]:
    """A copy that training does not change."""
    options = StagingOptions(
        use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
    )
    stager = DefaultStager(options)
    try:
        copy = stager.stage(state)
    finally:
        stager.close()
    assert isinstance(copy, dict)
    return copy


def _plain_bytes(x: Any, what: str) -> bytes:
    """`x` as a file that can be read back without running anyone's code."""
    buffer = io.BytesIO()
    torch.save(x, buffer)
    content = buffer.getvalue()
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise TypeError(
            f"{what} must consist of numbers, strings, tensors, lists and dicts, or no run could go on from them; "
            f"what a state_dict returned does not: {str(error).splitlines()[0]}"
        ) from error
    return content
