"""Where rows come from: files, Hugging Face data sets, Python functions; weighted mixtures and the held-out split."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from rl2lightning.data.tables import load_dataset, read_directory
from rl2lightning.types import Row
from rl2lightning.usercode import load_file

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
_NUM_SHOWN = 16  # rows that a fingerprint is of
_HUB_NAME = re.compile(
    r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?"
)  # owner/name, then the configuration of data sets that have several


@dataclass(frozen=True)
class Source:
    """One source of rows and its share of a mixture.

    Args:
        path: a json, jsonl, csv, parquet or arrow file; a data-set directory (`save_to_disk`, or files); a Hugging Face
            name (`owner/name`, `owner/name:configuration`); or a Python file. `split@path` picks the split, `train`
            unless given; of a Python file it names the function that returns the rows, a list of dicts.
        weight: how often each row is seen in one pass: 1 once, 0.5 every second one, drawn anew in each pass, 2 twice.
    """

    path: str
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(
                f"weight={self.weight} of source {self.path!r} must be positive; remove the source instead"
            )


class Rows:
    """The rows of several sources laid end to end; read lazily where the source allows it."""

    def __init__(self, parts: Sequence[Sequence[Row]], sources: Sequence[Source]) -> None:
        self.parts, self.sources = parts, sources
        self.starts = [0, *accumulate(len(part) for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        part = bisect_right(self.starts, index) - 1
        return self.parts[part][index - self.starts[part]]

    def __iter__(self) -> Iterator[Row]:
        for part in self.parts:  # whole parts at a time: Arrow then reads in chunks
            yield from part

    def where(self, index: int) -> str:
        """How an error names a row."""
        part = bisect_right(self.starts, index) - 1
        return f"row {index - self.starts[part]} of {self.sources[part].path}"

    def mixture(self, indices: Sequence[int], generator: torch.Generator) -> list[int]:
        """One pass over the rows at `indices` (ascending), each source repeated and subsampled by its weight.

        The length does not depend on the generator, which only picks the rows that a fractional weight lets in.
        """
        mixed: list[int] = []
        for source, start, stop in zip(self.sources, self.starts, self.starts[1:], strict=False):
            own = [i for i in indices if start <= i < stop]
            num_drawn = round(len(own) * source.weight)
            if own and not num_drawn:
                raise ValueError(f"weight={source.weight} of source {source.path!r} leaves none of its {len(own)} rows")
            repeats, rest = divmod(num_drawn, max(len(own), 1))
            mixed += own * repeats
            if rest:
                mixed += [own[i] for i in torch.randperm(len(own), generator=generator)[:rest].tolist()]
        return mixed


@dataclass(frozen=True)
class Split:
    """Some of the rows, by index: the training rows or the held-out ones."""

    rows: Rows
    indices: list[int] = field(repr=False)

    def __len__(self) -> int:
        return len(self.indices)

    def fingerprint(self) -> str:
        """Tells other rows from these by a few of them, the first and the last among them."""
        last = len(self) - 1
        shown = sorted({last * i // (_NUM_SHOWN - 1) for i in range(_NUM_SHOWN)}) if len(self) else []
        rows = [self.rows[self.indices[i]] for i in shown]
        # of what is no JSON (images, say) the type: its text may name where it is in memory
        text = json.dumps(rows, default=lambda value: type(value).__name__, skipkeys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def split_rows(num_rows: int, ratio: float, seed: int) -> tuple[list[int], list[int]]:
    """Indices of the training and of the held-out rows, both ascending; the same for the same arguments, always.

    Args:
        num_rows: rows to split.
        ratio: share that is held out, in [0, 1); at least one row unless it is 0.
        seed: picks the rows.
    """
    if not 0 <= ratio < 1:
        raise ValueError(f"val_ratio={ratio} must lie in [0, 1)")
    num_held_out = max(1, round(num_rows * ratio)) if ratio else 0
    if num_held_out >= num_rows:
        raise ValueError(f"val_ratio={ratio} leaves none of {num_rows} rows to train on: lower it or set val_path")
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed)).tolist()
    return sorted(order[num_held_out:]), sorted(order[:num_held_out])


def load_rows(path: str | Source | Sequence[str | Source]) -> Rows:
    """Read one source or several, see `Source`.

    Raises:
        ValueError: the file is missing, has an unknown extension, lacks the split or is empty; the hub is not reached.
    """
    given = [path] if isinstance(path, (str, Source)) else list(path)
    sources = [Source(item) if isinstance(item, str) else item for item in given]
    if not sources:
        raise ValueError("the list of data sources is empty: give at least one path")
    parts = []
    for source in sources:
        part = _read(source.path)
        if not len(part):
            raise ValueError(f"data set {source.path!r} is empty")
        parts.append(part)
    return Rows(parts, sources)


def require(row: Row, key: str, setting: str) -> Any:
    """row[key]; a null is none, whether the row has it or lacks the column, which Arrow fills with nulls."""
    if row.get(key) is None:
        present = ", ".join(name for name, value in row.items() if value is not None)
        if key in row:
            raise ValueError(
                f"{key!r} is null or missing (the row's keys: {present}); fill it in, leave the row out, or "
                f"set {setting} to the column that holds it"
            )
        raise ValueError(f"no {key!r} (the row's keys: {present}); set {setting} to the column that holds it")
    return row[key]


def _read(path: str) -> Sequence[Row]:
    split, location = _split_and_location(path)
    file = Path(location).expanduser()
    if file.suffix == ".py" or file.suffix in _BUILDERS:
        if not file.is_file():
            raise ValueError(f"data file {str(file)!r} does not exist")
        if file.suffix == ".py":
            return _call_function(file, split)
        return load_dataset(path, _BUILDERS[file.suffix], split, data_files=str(file))
    if file.is_dir():
        return read_directory(path, file, split)
    if file.is_file():
        known = ", ".join([*_BUILDERS, ".py"])
        raise ValueError(f"data file {str(file)!r} has an unknown extension {file.suffix!r}: use one of {known}")
    if location.startswith(("/", "./", "../", "~")) or not _HUB_NAME.fullmatch(location):
        raise ValueError(f"data path {location!r} does not exist")
    name, _, configuration = location.partition(":")
    return load_dataset(path, name, split, name=configuration or None)


def _split_and_location(path: str) -> tuple[str, str]:
    split, at, location = path.partition("@")
    if not at or "/" in split or Path(path).exists():  # an @ further down the path is part of a directory's name
        return "train", path
    return split, location


def _call_function(file: Path, name: str) -> Sequence[Row]:
    """The rows that function `name` of a Python file returns. The user asked for that file by its path."""
    module = load_file(str(file), setting="data.path")
    functions = {
        key: value for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")
    }
    if name not in functions:
        raise ValueError(
            f"{str(file)!r} has no function {name!r}: write function@{file.name}, of {', '.join(functions) or 'none'}"
        )
    rows = functions[name]()
    if not isinstance(rows, Sequence) or isinstance(rows, str):
        raise ValueError(f"{name} in {str(file)!r} must return a list of rows, not {type(rows).__name__}")
    for i, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(f"row {i} from {name} in {str(file)!r} must be a dict, not {type(row).__name__}")
    return rows
