"""Reads records from files (JSON, Parquet, CSV, TSV), Hugging Face dataset folders, and the Hub.

Each record is a mapping with its file and line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob, has_magic
from itertools import islice
from pathlib import Path
from typing import Any

from rlflow.data import hub
from rlflow.data.hub_names import HubName
from rlflow.data.json_files import json_rows, line_rows
from rlflow.data.text_tables import text_rows
from rlflow.errors import Place, PlanError, Problem, listed, nearest
from rlflow.extras import require

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
DESCRIPTIONS = ("dataset_infos.json", "config.json")  # files that describe the data in a folder
SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass(frozen=True, slots=True)
class Raw:
    """One record as it is in the file, with its place.

    In a Parquet file or dataset folder, the line of ``place`` is the row number, counted from 1.
    """

    fields: Mapping[str, Any]
    place: Place
    number: int = 0  # the record's number among all records, from 0; unreadable lines count too
    # True if the record comes from Arrow, which adds None for missing keys of nested values.
    filled: bool = False
    text: bool = False  # True if all values are strings, as in CSV


Items = Iterator[Raw | Problem]


@dataclass(frozen=True)
class Splits:
    """The splits of an opened source of records, each read only when needed."""

    name: str  # of the source, in messages
    readers: Mapping[
        str, Callable[[], Items]
    ]  # split → its records; one named "" for a source without splits
    streamed: bool = False  # True if reading records downloads them

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the splits. Empty for a source without splits."""
        return tuple(name for name in self.readers if name)

    def chosen(self, part: str | None, usual: str = "train") -> str:
        """Return the split to read: ``part``, or else the only one, ``usual``, or "train".

        Raises PlanError if there is no such split.
        """
        usual = usual if usual in self.readers else "train"
        name = part or (usual if len(self.readers) > 1 else next(iter(self.readers)))
        if name not in self.readers:
            raise _no_part(self.name, name, self.names)
        return name

    def items(self, split: str, first: int = 0) -> Items:
        """Yield the records of a split, and a problem for each line without a valid record.

        ``first``: the number to give to the first record.
        """
        for number, item in enumerate(self.readers[split](), first):
            yield replace(item, number=number) if isinstance(item, Raw) else item

    def limited(self, count: int) -> Splits:
        """Return the source with only the first ``count`` lines of each split; the others are never read."""
        return replace(
            self, readers={name: partial(_first, count, reader) for name, reader in self.readers.items()}
        )

    def read(self, split: str, first: int = 0) -> tuple[list[Raw], list[Problem]]:
        """Return (records, problems) of a split, with a problem for each line without a valid record.

        ``first``: the number to give to the first record. Raises PlanError if nothing can be read.
        """
        items = list(self.items(split, first))
        if not items:
            raise self.empty()
        return (
            [item for item in items if isinstance(item, Raw)],
            [item for item in items if isinstance(item, Problem)],
        )

    def empty(self) -> PlanError:
        """Return the error for a split without any lines."""
        return PlanError.of(
            "data-empty",
            f"{self.name} contains no records",
            found="no line, row or file with a record",
            expected="one record or more",
            remedy="write the records to it, or name other data",
        )


def read(where: Path | HubName, part: str | None = None) -> tuple[list[Raw], list[Problem]]:
    """Return (records, problems) of a file, a file pattern, a folder or a data set on the Hub.

    ``part``: the split to read if there are several. Raises PlanError if nothing can be read.
    """
    source = opened(where)
    return source.read(source.chosen(part))


def first_record(where: Path | HubName) -> Raw | None:
    """Return the first valid record that ``read`` would return, without reading the others, or None.

    Raises PlanError if there is no data.
    """
    source = opened(where)
    return next((item for item in source.readers[source.chosen(None)]() if isinstance(item, Raw)), None)


def opened(where: Path | HubName, stream: bool = False) -> Splits:
    """Return the splits of a file, a file pattern, a folder or a data set on the Hub.

    ``stream``: True to keep no copy of a data set on the Hub, and to download only the rows that are read.
    Raises PlanError if there is no data.
    """
    if isinstance(where, HubName):
        name = str(replace(where, revision=None))
        rows = hub.streamed_data(where) if stream else hub.load_data(where)
        return Splits(name, _of_rows(rows, name), stream)
    if where.is_dir():
        return Splits(str(where), _folder(where))
    files = matching(where)
    if not files:
        raise no_such_file(where)
    return Splits(str(where), {"": partial(_files, files)})


def matching(path: Path) -> list[Path]:
    """Return the file at a path, or the files matching a pattern such as data/*.jsonl, sorted by name."""
    if path.exists() or not has_magic(str(path)):
        return [path] if path.exists() else []
    return [Path(name) for name in sorted(glob(str(path), recursive=True)) if Path(name).is_file()]


def _first(count: int, reader: Callable[[], Items]) -> Items:
    return islice(reader(), count)


def _files(files: Sequence[Path]) -> Items:
    return (item for file in files for item in _file(file))


def _file(path: Path) -> Items:
    match path.suffix:
        case ".jsonl":
            return _raw(line_rows(path))
        case ".json":
            return _raw(json_rows(path))
        case ".parquet":
            return _parquet(path)
        case ".csv" | ".tsv":
            return _raw(text_rows(path), text=True)
    raise unknown_format(path)


def unknown_format(path: Path) -> PlanError:
    """Return the error for a file whose suffix isn't in SUFFIXES."""
    return PlanError.of(
        "data-format",
        f"cannot read {path} as data",
        found=path.suffix or "no suffix",
        expected=f"{listed(SUFFIXES)}, or a Hugging Face dataset folder",
        remedy="write one JSON object per line to a .jsonl file",
    )


def _raw(rows: Iterable[tuple[Mapping[str, Any], Place] | Problem], text: bool = False) -> Items:
    return (row if isinstance(row, Problem) else Raw(*row, text=text) for row in rows)


def _parquet(path: Path) -> Items:
    parquet = require("pyarrow.parquet", extra="tasks")
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from _numbered(rows, str(path))
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
        raise PlanError.of(
            "data-parquet",
            f"{path} is not a readable Parquet file: {error}",
            expected="a Parquet file",
            remedy="write the file again, or write one JSON object per line to a .jsonl file",
        ) from error


def _folder(path: Path) -> dict[str, Callable[[], Items]]:
    """Return the records in a folder of data, by split."""
    if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
        data = require("datasets", extra="tasks").load_from_disk(str(path))
        return _of_rows(data if isinstance(data, Mapping) else {"": data}, str(path))
    files = _data_files(path)
    if not files:
        raise PlanError.of(
            "data-folder",
            f"{path} contains no data",
            found=listed(sorted(item.name for item in path.iterdir())),
            expected=f"a folder written by datasets' save_to_disk, or a folder with {listed(SUFFIXES)} files",
            remedy="name the folder or file that contains the records",
        )
    names = list(dict.fromkeys(filter(None, map(_split_of, files))))
    if not names:
        return {"": partial(_files, files)}
    return {
        name: partial(_of_part, path, [file for file in files if _split_of(file) == name]) for name in names
    }


def _data_files(path: Path) -> list[Path]:
    """Return the files in a folder that contain data, sorted by name.

    Folders of data often have .json files that describe it, so these count only if there are no others.
    """
    found = sorted(
        file for file in path.rglob("*") if file.suffix in SUFFIXES and not _hidden(file.relative_to(path))
    )
    return [file for file in found if file.suffix != ".json"] or [
        file for file in found if file.name not in DESCRIPTIONS
    ]


def _hidden(path: Path) -> bool:
    return any(step.startswith(".") for step in path.parts)


def _of_part(path: Path, files: Sequence[Path]) -> Items:
    """Return the records in the files of one split. Raises PlanError if their configurations differ."""
    folders = sorted({str(file.parent) for file in files})
    if len(folders) > 1:
        raise PlanError.of(
            "data-folder",
            f"{path} contains several configurations",
            found=listed(folders),
            expected="one configuration",
            remedy=f"name one, such as {folders[0]}",
        )
    return _files(files)


def _split_of(file: Path) -> str:
    """Return the split that a file's name begins with, as in train-00000-of-00001.parquet, or ""."""
    stem = file.stem.partition("-")[0]
    return stem if stem in SPLITS else ""


def _of_rows(splits: Mapping[str, Iterable[Mapping[str, Any]]], name: str) -> dict[str, Callable[[], Items]]:
    return {split: partial(_numbered, rows, name) for split, rows in splits.items()}


def _numbered(rows: Iterable[Mapping[str, Any]], path: str) -> Items:
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
    """Return the error for a path that doesn't exist, suggesting the most similar file or folder."""
    parent = next(folder for folder in (path.parent, *path.parent.parents) if folder.is_dir())
    siblings = [item.name for item in parent.iterdir()]
    missing = path if parent == path.parent else path.parents[len(path.relative_to(parent).parts) - 2]
    close = nearest(missing.name, siblings)
    return PlanError.of(
        "data-missing",
        f"no such data: {path}",
        found=f"{parent} contains {listed(sorted(siblings))}",
        expected=f"a {', '.join(SUFFIXES)} file, a pattern such as 'data/*.jsonl', a Hugging Face dataset "
        "folder, a data set on the Hub (OWNER/NAME), or the name of a reasoning-gym task",
        nearest=close and str(parent / close),
        remedy="correct the path; a relative path starts from the folder in which the command runs",
    )
