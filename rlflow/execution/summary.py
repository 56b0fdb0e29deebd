"""Summarizes an iteration: health metrics, a few sample rows, and the rows with non-finite values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rlflow.author.batch import Batch
from rlflow.author.columns import Level
from rlflow.author.figures import Figure
from rlflow.execution.row_figures import NO_REWARDS, ScoredRecords, health

SAMPLES = 4  # number of rows that each iteration writes to samples.jsonl
WATCHED = ("scores", "logprobs", "ref_logprobs", "sampled_logprobs", "values", "returns")


@dataclass(frozen=True)
class IterationSummary:
    """The summary of the columns that an iteration recorded."""

    health: dict[Figure, float] = field(default_factory=dict)  # metrics of its rows
    rows: list[dict[str, Any]] = field(default_factory=list)  # the first rows as plain values
    # rows with a non-finite value, as ``position.sample``
    broken: list[str] = field(default_factory=list)
    # the watched column with the finite value furthest from 0, and the absolute value
    largest: tuple[str, float] = ("", 0.0)
    scored: int = 0  # scored rows, including rows with a missing score


def summarise(records: Mapping[str, Batch], judged: ScoredRecords = NO_REWARDS) -> IterationSummary:
    """Return the health metrics, samples and non-finite rows of an iteration.

    ``records``: for each name, a batch with this column. ``judged``: which of these columns are scores or
    depend on scores.
    """
    scored = len(records["scores"]) if "scores" in records else 0
    return IterationSummary(
        health(records, judged), sample_rows(records, SAMPLES), broken_rows(records), largest(records), scored
    )


def sample_rows(records: Mapping[str, Batch], limit: int) -> list[dict[str, Any]]:
    """Return the first ``limit`` recorded rows as plain values.

    Each has its prompt, answer, completion, finish reason and score, and the turns of its episode.
    """
    texts = {
        name: batch
        for name, batch in records.items()
        if name in ("prompt", "answer", "completion", "finish", "scores", "episode")
    }
    if "completion" not in texts:
        return []
    axis = texts["completion"].axis
    rows: list[dict[str, Any]] = [{} for _ in range(min(limit, len(axis)))]
    for name, batch in texts.items():
        index = batch.axis.rows_of(axis)
        if index is None or bool((index < 0).any()):
            continue
        values = batch[name]
        for row, where in zip(rows, index.tolist(), strict=False):
            value = values[where]
            row[name] = json.loads(value) if name == "episode" else _plain(value)
    return rows


def _plain(value: Any) -> str | float | None:
    """Return text unchanged, a finite number as a float, and other numbers as None."""
    return value if isinstance(value, str) else float(value) if math.isfinite(float(value)) else None


def broken_rows(records: Mapping[str, Batch]) -> list[str]:
    """Return the rows with a non-finite value in a watched column, as strings ``position.sample``."""
    names: dict[str, None] = {}
    for name in WATCHED:
        if name in records:
            batch = records[name]
            names |= {
                ".".join(map(str, path)): None
                for path in batch.axis.keys[_bad_rows(batch, name, records)].tolist()
            }
    return list(names)


def largest(records: Mapping[str, Batch]) -> tuple[str, float]:
    """Return the name of the watched column with the largest finite absolute value, and that value.

    Returns ("", 0.0) if there are no finite values.
    """
    found = ("", 0.0)
    for name in WATCHED:
        values = torch.as_tensor(records[name].data[name].value).abs() if name in records else torch.zeros(0)
        values = values[values.isfinite()]
        found = max(found, (name, float(values.max()) if len(values) else 0.0), key=lambda each: each[1])
    return found


def _bad_rows(batch: Batch, name: str, records: Mapping[str, Batch]) -> torch.Tensor:
    data = batch.data[name]
    if data.kind.level is not Level.TOKEN:
        return ~torch.as_tensor(data.value).isfinite()
    bad = ~data.value.isfinite()
    if "mask" in records and records["mask"].axis is batch.axis:
        bad &= records["mask"].data["mask"].value
    rows = torch.arange(len(batch)).repeat_interleave(data.row_lengths)
    return torch.zeros(len(batch), dtype=torch.bool).index_put_((rows,), bad, accumulate=True)
