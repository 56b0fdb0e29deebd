"""Reads passages from a JSON Lines file, and ranks them with BM25 (Robertson and Zaragoza 2009).

Used by `--env search` and `rlflow serve retrieve`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError
from rlflow.extras import require


@dataclass(frozen=True)
class Passages:
    """The passages of a file, in file order."""

    texts: list[str]  # "title: text"
    contents: list[str]  # the title on its own line before the text, as verl's clients read it
    ids: list[str]  # the field ``id``, or the passage's number from 0

    @staticmethod
    def of(file: Path) -> Passages:
        """Read the passages from a JSON Lines file.

        Each object has ``text`` and optionally ``title``, or ``contents`` as in verl's corpora. Raises
        PlanError if the file can't be read or is invalid.
        """
        try:
            lines = [line for line in file.read_text("utf-8").split("\n") if line.strip()]
        except (OSError, ValueError) as error:
            raise _unread(file, str(error)) from error
        records = [_record(file, number, line) for number, line in enumerate(lines, 1)]
        if not records:
            raise _unread(file, "no passages")
        ids = [str(record.get("id", number)) for number, record in enumerate(records)]
        return Passages(
            [_joined(record, ": ") for record in records], [_joined(record, "\n") for record in records], ids
        )


def _record(file: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _unread(file, f"line {number}: {line[:80]}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text", record.get("contents")), str):
        raise _unread(file, f"line {number}: {line[:80]}")
    if not all(
        _sound(record[name]) for name in ("text", "contents", "title", "id") if record.get(name) is not None
    ):
        raise _unread(
            file, f"line {number}: {line[:80]}, with a lone surrogate or a value that is not a text"
        )
    return record


def _sound(value: Any) -> bool:
    """True for an integer, or a string without lone surrogates: a value that can be sent as JSON."""
    return isinstance(value, int) or (
        isinstance(value, str) and not any("\ud800" <= letter <= "\udfff" for letter in value)
    )


def _joined(record: dict[str, Any], between: str) -> str:
    """Return a passage's title and text with ``between`` in between, or just the text if it has no title."""
    title, text = str(record.get("title") or ""), record["text"] if "text" in record else record["contents"]
    return f"{title}{between}{text}" if title else text


def _unread(file: Path, content: str) -> PlanError:
    return PlanError.of(
        "corpus",
        f"the corpus '{file}' cannot be read",
        found=content,
        expected='a JSON Lines file: {"text": "…"} in each line, optionally with "title" and "id", or '
        '{"contents": "…"}',
        remedy="name another file, or convert it to this format",
    )


class BM25:
    """Ranks passages by BM25."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25s: Any = require("bm25s", extra="search")
        self._index, self._count = self._bm25s.BM25(), len(texts)
        self._index.index(self._bm25s.tokenize(list(texts), show_progress=False), show_progress=False)

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """Return up to ``count`` passages that match a query, best first, as (passage number, BM25 score).

        Returns an empty list if the query has no words.
        """
        tokens = self._bm25s.tokenize(query, show_progress=False, return_ids=False)
        if not tokens or not tokens[0]:
            return []
        places, scores = self._index.retrieve(tokens, k=min(count, self._count), show_progress=False)
        return [
            (int(place), float(score))
            for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True)
            if score > 0
        ]
