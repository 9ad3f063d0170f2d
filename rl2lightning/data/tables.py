"""Tables read by `datasets`: from files, directories and the hub.

JSON files are read once more where `datasets` would give back something else than they hold. Of a column that mixes
types it keeps the JSON of every value, but of a string that is JSON by itself only the string: "86" comes back as 86,
"null" as nothing. Strings that look like times it reads as times. What a column holds it takes from the start of the
first file: one that mixes types only later comes back as JSON text.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rl2lightning.types import Row

_START = 10 << 20  # bytes that `datasets` takes the types from


def read_directory(path: str, directory: Path, split: str) -> Sequence[Row]:
    import datasets

    if not any((directory / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return load_dataset(path, str(directory), split)
    saved: Any = datasets.load_from_disk(str(directory))
    if isinstance(saved, dict):  # a DatasetDict
        if split not in saved:
            raise ValueError(f"data set {str(directory)!r} has no split {split!r}: it has {', '.join(saved)}")
        return saved[split]
    if split != "train":
        raise ValueError(f"data set {str(directory)!r} was saved without splits: drop {split + '@'!r} from {path!r}")
    return saved


def load_dataset(path: str, builder: str, split: str, **arguments: Any) -> Sequence[Row]:
    import datasets
    from datasets.exceptions import DatasetsError

    try:
        loaded: Any = datasets.load_dataset(builder, split=split, **arguments)
        return _exact_rows(loaded, split, builder, arguments)
    except ConnectionError as error:
        raise ValueError(
            f"{path!r} is no local path and the Hugging Face hub was not reached ({error}): "
            "check the spelling, the network and HF_HUB_OFFLINE"
        ) from error
    except StopIteration:  # what the json reader raises on a file without rows
        raise ValueError(f"data set {path!r} is empty") from None
    except (ValueError, OSError, DatasetsError) as error:
        if "corresponds to no data" in str(error):  # and what it raises on an empty list or slice
            raise ValueError(f"data set {path!r} is empty") from None
        raise ValueError(f"cannot read data set {path!r}: {error.__cause__ or error}") from error


def _exact_rows(loaded: Any, split: str, builder: str, arguments: dict[str, Any]) -> Any:
    """The data set `loaded`, or where that may differ from its JSON files one that does not.

    It is made of the files row by row, cached as any other and made anew only when they change.

    Args:
        loaded: a `datasets.Dataset`.
        split: what was asked for, slices included.
        builder: what it was loaded with, and
        arguments: how.
    """
    import datasets
    from datasets.packaged_modules.json.json import Json

    exact = not _loses(loaded.features)
    if exact and (loaded.info.dataset_size or 0) < _START // 2:  # of Arrow, which is about as large as JSON
        return loaded
    source = datasets.load_dataset_builder(builder, **arguments)
    if not isinstance(source, Json) or source.config.data_files is None:
        return loaded  # files of another format say themselves what they hold
    manager = datasets.DownloadManager()
    if exact:
        found = source.config.data_files.values()
        for file in manager.iter_files(manager.download_and_extract([str(file) for files in found for file in files])):
            _check_types(file, loaded.features)
        return loaded
    features = datasets.Features({name: _with_text(feature) for name, feature in loaded.features.items()})
    counts = {name: info.num_examples for name, info in loaded.info.splits.items()}
    parts = []
    for part in datasets.ReadInstruction.from_spec(split).to_absolute(counts):
        files = list(manager.iter_files(manager.download_and_extract(list(source.config.data_files[part.splitname]))))
        stamps = [(file, os.stat(file).st_mtime_ns, os.stat(file).st_size) for file in files]
        rows: Any = datasets.Dataset.from_generator(
            _read,
            features=features,
            split=datasets.NamedSplit(part.splitname),
            gen_kwargs={"files": json.dumps(stamps), "features": features},
        )
        parts.append(rows.select(range(len(rows))[part.from_ : part.to]))
    return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)


def _check_types(file: str, features: Any) -> None:
    """Whether a file keeps to one type a column, read in passing."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    with open(file, "rb") as opened:
        if opened.read(1) == b"[":
            return  # read as a whole
    form = arrow_json.ParseOptions(
        explicit_schema=pa.schema(list(_plain(features))), unexpected_field_behavior="ignore"
    )
    try:
        for _ in arrow_json.open_json(file, arrow_json.ReadOptions(block_size=_START), form):
            pass
    except pa.ArrowInvalid as error:
        if "changed from" in str(error):  # "Column(/name) changed from string to array in row 3"
            change = str(error)[str(error).index("Column(") :].rpartition(" in row")[0]
            raise ValueError(
                f"a column of '{file}' mixes types beyond the first {_START >> 20} MB, from which its type is taken: "
                f"{change}; write all its values as one type (of messages, all as lists)"
            ) from None


def _plain(features: Any) -> Iterator[Any]:
    """Arrow's fields of what is of one type."""
    import datasets
    import pyarrow as pa

    for name, feature in features.items():
        inner, depth = feature, 0
        while isinstance(inner, datasets.List):
            inner, depth = inner.feature, depth + 1
        if isinstance(inner, dict):
            kind = pa.struct(list(_plain(inner)))
        elif isinstance(inner, datasets.Value) and inner.dtype != "null":
            kind = inner.pa_type
        else:
            continue
        for _ in range(depth):
            kind = pa.list_(kind)
        yield pa.field(name, kind)


def _read(files: str, features: Any) -> Iterator[Row]:
    """The rows of files, what is of no one type as JSON. The stamps of the files are there for the cache's key."""
    for file, *_ in json.loads(files):
        for i, row in enumerate(_objects(file)):
            if not isinstance(row, dict):
                raise ValueError(f"row {i} of '{file}' must be an object, not {type(row).__name__}")
            yield _encoded(row, dict(features))


def _objects(file: str) -> Iterator[Any]:
    with open(file, encoding="utf-8-sig") as lines:
        if lines.read(1) == "[":
            lines.seek(0)
            yield from json.load(lines)
            return
        lines.seek(0)
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _encoded(value: Any, feature: Any) -> Any:
    import datasets

    if value is None:
        return None
    if _is_json(feature):
        return json.dumps(value)  # a string, too: what is JSON already, `datasets` takes as it is
    if isinstance(feature, dict):
        return {name: _encoded(value.get(name), inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List):
        return [_encoded(item, feature.feature) for item in value]
    return value


def _loses(feature: Any) -> bool:
    """Whether values of this type may be others in the file."""
    import datasets

    if isinstance(feature, dict):
        return any(map(_loses, feature.values()))
    if isinstance(feature, datasets.List):
        return _loses(feature.feature)
    return _is_json(feature) or _is_time(feature)


def _with_text(feature: Any) -> Any:
    """The type with strings for times: JSON has none."""
    import datasets

    if isinstance(feature, dict):
        return {name: _with_text(inner) for name, inner in feature.items()}
    if isinstance(feature, datasets.List):
        return datasets.List(_with_text(feature.feature), length=feature.length)
    return datasets.Value("string") if _is_time(feature) else feature


def _is_json(feature: Any) -> bool:
    return type(feature).__name__ == "Json"  # `datasets` before 4.7 lacks it, and refuses mixed columns itself


def _is_time(feature: Any) -> bool:
    return str(getattr(feature, "dtype", "")).startswith(("timestamp", "date", "time", "duration"))
