"""Reads the rows of CSV and TSV files. All values are strings."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from rlflow.errors import Place, PlanError, Problem, listed

DELIMITERS = {".csv": ",", ".tsv": "\t"}


def text_rows(path: Path) -> Iterator[tuple[dict[str, str], Place] | Problem]:
    """For each row after the header, yield (text by field, place), or a problem if the row doesn't fit.

    The place is the line on which the row begins. Raises PlanError if the header names no fields or repeats
    one, or if the file isn't UTF-8 or CSV.
    """
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, delimiter=DELIMITERS[path.suffix], strict=True)
        try:
            header = next(rows, [])
            _check_header(path, header)
            before = rows.line_num
            for row in rows:
                place, before = Place(str(path), before + 1), rows.line_num
                if len(row) == len(header):
                    yield dict(zip(header, row, strict=True)), place
                elif row:
                    yield _ragged(place, header, row)
        except (csv.Error, UnicodeDecodeError) as error:
            raise PlanError.of(
                "data-csv",
                f"not a valid {path.suffix} file: {error}",
                place=Place(str(path), rows.line_num + 1),
                expected="UTF-8 text; a value with quotes or line breaks is quoted, and quotes in it are doubled",
                remedy="correct the line, or save the file again as UTF-8",
            ) from error


def _check_header(path: Path, header: list[str]) -> None:
    twice = [name for name, count in Counter(header).items() if count > 1 or not name.strip()]
    if twice or not header:
        raise PlanError.of(
            "data-csv",
            f"the first line of {path} does not name the fields",
            place=Place(str(path), 1),
            found=listed(header),
            expected="a different name for each field",
            remedy="write the names of the fields into the first line, such as question,answer",
        )


def _ragged(place: Place, header: list[str], row: list[str]) -> Problem:
    return Problem(
        "data-csv",
        f"the row has {len(row)} values, and the header names {len(header)} fields",
        place,
        found=listed(row, 8)[:200],
        expected=f"values for {listed(header)}",
        remedy='quote values that contain the delimiter: "a, b"',
    )
