"""Passages of a JSON Lines file, and BM25 over them (Robertson and Zaragoza 2009), for `--env search` and `rlflow serve retrieve`."""

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
    """The passages of a file, in its order."""

    texts: list[str]
    ids: list[str]  # the field ``id``, or the number of the line from 0

    @staticmethod
    def of(file: Path) -> Passages:
        """Read a file with an object in each line: ``text`` and, if wanted, ``title``; or ``contents``, as verl's corpora have it. Raises
        PlanError for a file that is no such one."""
        try:
            lines = [line for line in file.read_text("utf-8").splitlines() if line.strip()]
            records = [json.loads(line) for line in lines]
        except (OSError, ValueError) as error:
            raise _unread(file, str(error)) from error
        if not records:
            raise _unread(file, "no passage")
        for number, record in enumerate(records, 1):
            if not isinstance(record, dict) or not {"text", "contents"} & record.keys():
                raise _unread(file, f"line {number}: {lines[number - 1][:80]}")
        return Passages([_passage(record) for record in records], [str(each.get("id", number)) for number, each in enumerate(records)])


def _passage(record: dict[str, Any]) -> str:
    title, text = str(record.get("title") or ""), str(record["text"] if "text" in record else record["contents"])
    return f"{title}: {text}" if title else text


def _unread(file: Path, content: str) -> PlanError:
    return PlanError.of("corpus", f"the corpus '{file}' cannot be read", found=content,
                        expected='a JSON Lines file: {"text": "…"} in each line, with "title" and "id" if wanted, or {"contents": "…"}',
                        remedy="name another file, or write it so")


class BM25:
    """Ranks passages by BM25."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25s: Any = require("bm25s", extra="search")
        self._index, self._count = self._bm25s.BM25(), len(texts)
        self._index.index(self._bm25s.tokenize(list(texts), show_progress=False), show_progress=False)

    def ranked(self, query: str, count: int) -> list[tuple[int, float]]:
        """(number of a passage, score) of those that fit a query best, the best one first; none for a query without words."""
        tokens = self._bm25s.tokenize(query, show_progress=False, return_ids=False)
        if not tokens or not tokens[0]:
            return []
        places, scores = self._index.retrieve(tokens, k=min(count, self._count), show_progress=False)
        return [(int(place), float(score)) for place, score in zip(places[0].tolist(), scores[0].tolist(), strict=True) if score > 0]
