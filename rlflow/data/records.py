"""Read the records of a file or folder (JSONL, Parquet, a Hugging Face dataset folder) or of the Hub.

Each record is a mapping with its file and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.data import hub
from rlflow.data.hub_names import HubName
from rlflow.errors import Place, PlanError, Problem, listed, nearest
from rlflow.extras import require

SUFFIXES = (".jsonl", ".parquet")
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, slots=True)
class Raw:
    """One record as it is in the file, with its place.

    In a Parquet file or dataset folder, the line of ``place`` is the row number, from 1.
    """

    fields: Mapping[str, Any]
    place: Place
    number: int = 0  # the record's number among all records, from 0; unreadable lines count too
    # True if the record comes from Arrow, which adds None for missing keys of nested values.
    filled: bool = False


def read(where: Path | HubName, part: str | None = None) -> tuple[list[Raw], list[Problem]]:
    """Return (records, problems) of a file, a folder or a data set on the Hub.

    A problem is a line without a valid record. ``part``: the split to read if there are several. Raises
    PlanError if nothing can be read.
    """
    items = list(_items(where, part))
    if not items:
        raise PlanError.of("data-empty", f"{where} contains no records", expected="one record or more")
    raw = [replace(item, number=number) for number, item in enumerate(items) if isinstance(item, Raw)]
    return raw, [item for item in items if isinstance(item, Problem)]


def _items(where: Path | HubName, part: str | None) -> Iterator[Raw | Problem]:
    if isinstance(where, HubName):
        return _of_splits(hub.load_data(where), _called(where), where.split or part)
    if not where.exists():
        raise no_such_file(where)
    return _folder(where, part) if where.is_dir() else _file(where)


def _called(name: HubName) -> str:
    """Return the name of a data set on the Hub in places of records."""
    return str(replace(name, revision=None))


def _file(path: Path) -> Iterator[Raw | Problem]:
    match path.suffix:
        case ".jsonl":
            return _jsonl(path)
        case ".parquet":
            return _parquet(path)
    raise PlanError.of(
        "data-format",
        f"cannot read {path} as data",
        found=path.suffix or "no suffix",
        expected=f"{listed(SUFFIXES)}, or a Hugging Face dataset folder",
        remedy="write one JSON object per line to a .jsonl file",
    )


def _jsonl(path: Path) -> Iterator[Raw | Problem]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _object(line.removeprefix(b"\xef\xbb\xbf"), Place(str(path), number))


def _object(line: bytes, place: Place) -> Raw | Problem:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        return Problem(
            "data-json",
            f"not valid JSON: {error}",
            place,
            found=repr(line[:60]),
            expected="one JSON object per line",
        )
    if not isinstance(value, dict):
        return Problem(
            "data-json",
            "the line is not a JSON object",
            place,
            found=type(value).__name__,
            expected='an object such as {"prompt": "…", "answer": "…"}',
        )
    return Raw(value, place)


def _parquet(path: Path) -> Iterator[Raw | Problem]:
    parquet = require("pyarrow.parquet", extra="tasks")
    try:
        table = parquet.read_table(path)
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise PlanError.of(
            "data-parquet", f"{path} is not a readable Parquet file: {error}", expected="a Parquet file"
        ) from error
    return _numbered(table.to_pylist(), str(path))


def _folder(path: Path, part: str | None) -> Iterator[Raw | Problem]:
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        return _saved(path, part)
    files = sorted(
        file for file in path.rglob("*") if file.suffix in SUFFIXES and not _hidden(file.relative_to(path))
    )
    if not files:
        raise PlanError.of(
            "data-folder",
            f"{path} contains no data",
            found=listed(sorted(item.name for item in path.iterdir())),
            expected="a folder written by datasets' save_to_disk, or a folder with .parquet or .jsonl files",
        )
    return (record for file in _of_part(path, files, part) for record in _file(file))


def _hidden(path: Path) -> bool:
    return any(step.startswith(".") for step in path.parts)


def _of_part(path: Path, files: list[Path], part: str | None) -> list[Path]:
    """Return the files of the split ``part``.

    If ``part`` is None, the split is "train" if files are named after splits; otherwise all files are
    returned. Raises PlanError if there are no such files, or if they belong to several configurations.
    """
    split_files = [file for file in files if _split_of(file)]
    part_files = (
        [file for file in files if _split_of(file) == (part or "train")] if part or split_files else files
    )
    if not part_files:
        raise _no_part(str(path), part or "train", {_split_of(file) for file in split_files})
    folders = sorted({str(file.parent) for file in part_files})
    if len(folders) > 1 and split_files:
        raise PlanError.of(
            "data-folder",
            f"{path} contains several configurations",
            found=listed(folders),
            expected="one configuration",
            remedy=f"name one, such as {folders[0]}",
        )
    return part_files


def _split_of(file: Path) -> str:
    """Return the split that begins the file's name, as in train-00000-of-00001.parquet; "" if there
    is none.
    """
    stem = file.stem.partition("-")[0]
    return stem if stem in SPLITS else ""


def _saved(path: Path, part: str | None) -> Iterator[Raw | Problem]:
    data = require("datasets", extra="tasks").load_from_disk(str(path))
    if isinstance(data, Mapping):
        return _of_splits(data, str(path), part)
    if part is not None:
        raise _no_part(str(path), part, ())
    return _numbered(data, str(path))


def _of_splits(splits: Mapping[str, Any], name: str, part: str | None) -> Iterator[Raw | Problem]:
    """Return the records of one split: ``part``, else the only one, else "train"."""
    chosen = part or ("train" if len(splits) > 1 else next(iter(splits)))
    if chosen not in splits:
        raise _no_part(name, chosen, splits)
    return _numbered(splits[chosen], name)


def _numbered(rows: Iterable[Mapping[str, Any]], path: str) -> Iterator[Raw | Problem]:
    return (Raw(row, Place(path, number), filled=True) for number, row in enumerate(rows, 1))


def _no_part(name: str, part: str, parts: Iterable[str]) -> PlanError:
    return PlanError.of(
        "data-split",
        f"{name} has no split '{part}'",
        found=listed(sorted(parts)),
        expected=part,
        nearest=nearest(part, parts),
        remedy="name one of the splits found",
    )


def no_such_file(path: Path) -> PlanError:
    """Return the error for a path that does not exist. It suggests the most similar file."""
    siblings = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    return PlanError.of(
        "data-missing",
        f"no such data: {path}",
        found=f"{path.parent} contains {listed(sorted(siblings))}",
        expected="a .jsonl or .parquet file, a Hugging Face dataset folder, or the name of a "
        "reasoning-gym task",
        nearest=nearest(path.name, siblings),
    )
