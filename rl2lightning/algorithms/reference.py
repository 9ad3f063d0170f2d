"""Log-probs of the frozen reference, scored once, kept on disk and found again by what they depend on.

A number belongs to the bytes of the model's weights and config, to the precision, and to the tokens of one sequence
with their mask. Nothing else can change it: data files, chat template, tokenizer and `max_length` act through the
tokens. So what is stale is never found, what changed is scored anew, and all the rest is reused.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor

from rl2lightning.parallel.strategy import FSDP2TPStrategy
from rl2lightning.types import ChatBatch, Sequences

T = TypeVar("T")

_FORMAT = b"1"  # of the files
_KEY_BYTES = 16
_PER_FILE = 100_000  # numbers written at a time, so that a long scoring that is interrupted goes on from there


class Loader(Protocol):
    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[ChatBatch]: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A data module whose rows can be read before they are trained on."""

    def read_ahead(self, *, training: bool) -> Sequence[Loader]:
        """Loaders of this process's share of all held-out rows and, if asked for, training rows, each row once.

        They have as many batches on every process, and leave the position in the data where it is.
        """
        ...


class PrecomputedReference:
    """What the reference says of the rows of a run, from disk or scored once; the same on every process.

    Args:
        strategy: of the run.
        root: directory with the numbers of all models.
        name: of this one among them, see `model_key`; asked on the first process alone.
    """

    def __init__(self, strategy: FSDP2TPStrategy, root: Path, name: Callable[[], str]) -> None:
        self.strategy, self.root, self.name = strategy, root, name
        self._numbers: dict[bytes, float] = {}

    def __call__(self, seqs: Sequences) -> Tensor:
        """[B] log-probs, each summed over a sequence's actions."""
        keys = sequence_keys(seqs)
        unknown = sum(key not in self._numbers for key in keys)
        if unknown:
            raise ValueError(
                f"{unknown} of {len(keys)} sequences were not among the rows that the reference scored beforehand, so "
                "the data changes while it is read: set model.init_args.reference to live"
            )
        return torch.tensor([self._numbers[key] for key in keys])

    def prepare(self, loaders: Sequence[Loader], score: Callable[[Sequences], Tensor], *, show_progress: bool) -> None:
        """Scores what is not on disk yet, each process its share, and has one of them write it there.

        Args:
            loaders: of this process's share of the rows.
            score: [B] of sequences that are the same on every process.
            show_progress: a bar on the first process.
        """
        directory, self._numbers = self._on_first_process(lambda: _load(self.root / self.name()))
        num_seen = num_dropped = num_new = 0
        new: dict[bytes, float] = {}

        def write() -> None:
            self._on_first_process(lambda: _add(directory, new))

        for batch in self._batches(loaders, show_progress):
            num_seen += 0 if batch.sequences is None else len(batch.sequences)
            num_dropped += batch.num_dropped
            seqs = self.strategy.gather_sequences(self._missing(batch.sequences))
            if seqs is None:  # every process has found all of its own
                continue
            scored = dict(zip(sequence_keys(seqs), score(seqs).tolist(), strict=True))
            num_new += len(seqs)
            self._numbers |= scored
            new |= scored
            if len(new) >= _PER_FILE:
                write()
                new = {}
        if new:
            write()
        total, dropped = (
            sum(counts) for counts in zip(*self.strategy.gather_objects((num_seen, num_dropped)), strict=True)
        )
        if dropped and not total:
            raise ValueError(
                f"all {dropped:,} samples were dropped, as empty, the same twice or cut off before their answers: "
                "raise data.max_length, or look at the rows of data.path"
            )
        rank_zero_info(f"reference log-probs of {total:,} sequences, {num_new:,} of them new, are in '{directory}'")

    def _missing(self, seqs: Sequences | None) -> Sequences | None:
        if seqs is None:
            return None
        # a half of a pair may be missing alone, and the rows of some processes may lack margins
        seqs = seqs.replace(labels=None, margins=None)
        indices = [i for i, key in enumerate(sequence_keys(seqs)) if key not in self._numbers]
        return seqs.select(indices) if indices else None

    def _batches(self, loaders: Sequence[Loader], show_progress: bool) -> Iterable[ChatBatch]:
        from tqdm.auto import tqdm

        silent = not (show_progress and self.strategy.is_global_zero)
        total = sum(map(len, loaders))
        return tqdm(chain(*loaders), total=total, desc="reference log-probs", disable=silent, leave=False)

    def _on_first_process(self, fn: Callable[[], T]) -> T:
        """What fn returns on the first process, or the error it raises, on all of them: that one may see the disk."""
        result: Any = None
        error, message = None, None
        if self.strategy.is_global_zero:
            try:
                result = fn()
            except Exception as raised:  # whatever it is: the others wait here to hear of it
                error, message = raised, str(raised) if isinstance(raised, ValueError) else repr(raised)
        result, message = self.strategy.broadcast((result, message))
        if message is not None:
            raise error or ValueError(message)
        return result


def sequence_keys(seqs: Sequences) -> list[bytes]:
    """What each sequence's number is kept under: a digest of its tokens and of which of them are actions."""
    lengths = seqs.lengths.tolist()
    parts = zip(seqs.input_ids.cpu().split(lengths), seqs.action_mask.cpu().split(lengths), strict=True)
    return [_digest(ids.numpy().tobytes(), mask.numpy().tobytes()) for ids, mask in parts]


def model_key(directory: str, dtype: torch.dtype, seed: int | None) -> str:
    """What the numbers of a model are kept under: a digest of its config, its weights and its precision.

    Args:
        directory: of the model; every byte of its weights is read.
        dtype: it computes in.
        seed: of random weights; None: those of the directory.
    """
    files = [] if seed is not None else sorted(Path(directory).glob("*.safetensors"))

    def digest(file: Path) -> bytes:
        with file.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").digest()

    with ThreadPoolExecutor(8) as pool:  # reading and hashing leave the interpreter's lock alone
        weights = list(pool.map(digest, files))
    config = (Path(directory) / "config.json").read_bytes()
    return _digest(_FORMAT, config, str(dtype).encode(), str(seed).encode(), *weights).hex()


# ---- files, of which each is complete or absent and never changed: runs that write at a time lose nothing


def _load(directory: Path) -> tuple[Path, dict[bytes, float]]:
    """The directory and all numbers in it, by `sequence_keys`; what a damaged file held is scored again."""
    numbers: dict[bytes, float] = {}
    for file in sorted(directory.glob("*.pt")):
        try:
            stored: dict[str, Any] = torch.load(file, weights_only=True)
            keys, logps = stored["keys"].numpy().tobytes(), stored["logps"].tolist()
        except Exception:  # whatever unpickling makes of a damaged file
            rank_zero_warn(f"'{file}' is damaged: the reference log-probs it held are scored again; delete that file")
            continue
        numbers |= {keys[i * _KEY_BYTES : (i + 1) * _KEY_BYTES]: x for i, x in enumerate(logps)}
    return directory, numbers


def _add(directory: Path, numbers: dict[bytes, float]) -> None:
    """Writes new numbers beside their place first: what a process leaves that is killed is never read."""
    keys = sorted(numbers)
    name = _digest(*keys).hex()
    stored = {
        "keys": torch.frombuffer(bytearray(b"".join(keys)), dtype=torch.uint8),
        "logps": torch.tensor([numbers[key] for key in keys]),
    }
    unfinished = directory / f"{name}.unfinished-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            torch.save(stored, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(directory / f"{name}.pt")
    except OSError as error:
        raise ValueError(
            f"reference log-probs cannot be written to '{directory}' ({error}): "
            "set model.init_args.reference_cache to another directory"
        ) from error


def _digest(*parts: bytes) -> bytes:
    """Of several byte strings, told apart by their lengths."""
    total = hashlib.blake2b(digest_size=_KEY_BYTES)
    for part in parts:
        total.update(len(part).to_bytes(8, "little") + part)
    return total.digest()
