"""Keeps a data set's records in memory, or in a temporary file if their texts are larger than LIMIT."""

from __future__ import annotations

import json
import mmap
import tempfile
from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any, overload

from rlflow.author.messages import Message, Packed
from rlflow.data.fields import Record
from rlflow.errors import Place

LIMIT = 1 << 30  # characters of texts; with more, records are written to a file


def stored(records: Iterable[Record]) -> Sequence[Record]:
    """Return the records as a sequence. Beyond LIMIT, they are in a file and read as needed.

    The file is in the folder for temporary files (TMPDIR), and disappears when the process ends.
    """
    kept: list[Record] = []
    size, writer = 0, None
    for record in records:
        if writer is not None:
            writer.add(record)
            continue
        kept.append(record)
        size += _characters(record)
        if size > LIMIT:
            writer = _RecordWriter()
            for each in kept:
                writer.add(each)
            kept = []
    return kept if writer is None else writer.written()


def picked(records: Sequence[Record], index: Iterable[int]) -> Sequence[Record]:
    """Return the records at ``index``, in this order. Records in a file stay there."""
    return records.picked(index) if isinstance(records, StoredRecords) else [records[i] for i in index]


class StoredRecords(Sequence[Record]):
    """Records in a file. Memory only holds where they are: 16 bytes for each record."""

    def __init__(self, data: mmap.mmap, starts: array[int], index: array[int]) -> None:
        """``starts``: where each record begins in the data, and the end. ``index``: which records to hold."""
        self._data, self._starts, self._index = data, starts, index

    def __len__(self) -> int:
        return len(self._index)

    @overload
    def __getitem__(self, place: int) -> Record: ...
    @overload
    def __getitem__(self, place: slice) -> list[Record]: ...
    def __getitem__(self, place: int | slice) -> Record | list[Record]:
        if isinstance(place, slice):
            return [self._read(number) for number in self._index[place]]
        return self._read(self._index[place])

    def __iter__(self) -> Iterator[Record]:
        return map(self._read, self._index)

    def picked(self, index: Iterable[int]) -> StoredRecords:
        """Return the records at ``index``, in this order, from the same file."""
        return StoredRecords(self._data, self._starts, array("q", (self._index[i] for i in index)))

    def _read(self, number: int) -> Record:
        prompt, answer, responses, more, place, own = json.loads(
            self._data[self._starts[number] : self._starts[number + 1]]
        )
        return Record(
            _text_or_messages(prompt),
            answer,
            tuple(map(_text_or_messages, responses)),
            {name: Packed(value[0]) if isinstance(value, list) else value for name, value in more.items()},
            Place(*place) if place else None,
            own,
        )


class _RecordWriter:
    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile(prefix="rlflow-records-")  # noqa: SIM115, as ``written`` closes it
        self._starts = array("q", [0])

    def add(self, record: Record) -> None:
        place = [record.place.path, record.place.line] if record.place else None
        fields = [
            record.prompt,
            record.answer,
            record.responses,
            # values are never lists, so a list marks packed messages
            {name: [value] if isinstance(value, Packed) else value for name, value in record.more.items()},
            place,
            record.number,
        ]
        self._starts.append(self._starts[-1] + self._file.write(json.dumps(fields).encode()))

    def written(self) -> StoredRecords:
        self._file.flush()
        data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        self._file.close()  # the mapping keeps the data
        return StoredRecords(data, self._starts, array("q", range(len(self._starts) - 1)))


def _text_or_messages(value: Any) -> str | tuple[Message, ...]:
    return value if isinstance(value, str) else tuple(value)


def _characters(record: Record) -> int:
    texts = [record.prompt, record.answer or "", *record.responses, *record.more.values()]
    return sum(len(text) if isinstance(text, str) else len(str(text)) for text in texts)
