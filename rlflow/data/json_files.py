"""Reads the records of JSON files: JSON Lines, or one array of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO, cast

from rlflow.errors import Place, PlanError, Problem

CHUNK = 1 << 16  # characters to read at once
LINES = "one JSON object per line"
SPACE = re.compile(r"[ \t\r\n]*")
EXAMPLE = 'an object such as {"prompt": "…", "answer": "…"}'

Items = Iterator[tuple[dict[str, Any], Place] | Problem]


def json_rows(path: Path) -> Items:
    """Yield (object, place) for each record of a .json file, or a problem for a value that isn't an object.

    The file is an array of objects, or has one object per line. The place is the line on which the object
    begins. Raises PlanError if the array isn't valid JSON.
    """
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        start = next((sign for sign in iter(lambda: file.read(1), "") if not sign.isspace()), "")
    return _Array(path).rows() if start == "[" else line_rows(path)


def line_rows(path: Path) -> Items:
    """Yield (object, place) for each line that isn't blank, or a problem for a line without an object."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _object(line.removeprefix(b"\xef\xbb\xbf"), Place(str(path), number))


def _object(line: bytes, place: Place) -> tuple[dict[str, Any], Place] | Problem:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
        return Problem(
            "data-json",
            f"not valid JSON: {error}",
            place,
            found=repr(line[:60]),
            expected=f"{LINES}, or an array of objects in a .json file",
            remedy="write each record on one line, without line breaks inside it",
        )
    return (value, place) if isinstance(value, dict) else _no_object(value, place)


def _no_object(value: Any, place: Place) -> Problem:
    return Problem(
        "data-json",
        "the record is not a JSON object",
        place,
        found=type(value).__name__,
        expected=EXAMPLE,
        remedy="write the record as an object, with a name for each value",
    )


class _Array:
    """Reads an array of JSON values, one value at a time, so that the file may be larger than the memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.text, self.at, self.line = "", 0, 1  # the unread part of the file begins at text[at]
        self.ended = False

    def rows(self) -> Items:
        """Yield (object, place) for each value, or a problem for a value that isn't an object."""
        with self.path.open(encoding="utf-8-sig") as file:
            try:
                self._skip("[", file)
                more = self._next(file) != "]"
                while more:
                    self._next(file)
                    place = Place(str(self.path), self.line)
                    value = self._value(file)
                    yield (value, place) if isinstance(value, dict) else _no_object(value, place)
                    if more := self._next(file) != "]":
                        self._skip(",", file)
                self._skip("]", file)
                if self._next(file):
                    raise ValueError("text after the end of the array")
            except (ValueError, RecursionError) as error:  # bad UTF-8 is a ValueError too
                raise PlanError.of(
                    "data-json",
                    f"not a valid JSON array: {error}",
                    place=Place(str(self.path), self.line),
                    found=repr(self.text[self.at : self.at + 60]),
                    expected=f"an array of objects, or {LINES}",
                    remedy="write the file again, with a JSON library or as JSON Lines",
                ) from error

    def _value(self, file: TextIO) -> Any:
        """Read the next value of the array."""
        while True:
            try:
                value, end = json.JSONDecoder().raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                if self.ended:
                    self._go_to(error.pos)
                    raise ValueError(error.msg) from error
                end = len(self.text)
            # a number could go on in the unread part of the file
            if end < len(self.text) or self.ended:
                self._go_to(end)
                return value
            self._read(file, max(CHUNK, len(self.text) - self.at))

    def _skip(self, sign: str, file: TextIO) -> None:
        if (found := self._next(file)) != sign:
            raise ValueError(f"found {found or 'the end of the file'!r} instead of {sign!r}")
        self._go_to(self.at + 1)

    def _next(self, file: TextIO) -> str:
        """Return the next character that isn't white space, or "" at the end of the file."""
        while True:
            self._go_to(cast("re.Match[str]", SPACE.match(self.text, self.at)).end())
            if self.at < len(self.text) or self.ended:
                return self.text[self.at : self.at + 1]
            self._read(file, CHUNK)

    def _read(self, file: TextIO, count: int) -> None:
        more = file.read(count)
        self.ended = not more
        self._go_to(self.at)
        self.text, self.at = self.text[self.at :] + more, 0

    def _go_to(self, end: int) -> None:
        self.line += self.text.count("\n", self.at, end)
        self.at = end
