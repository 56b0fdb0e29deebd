"""Open only the first records of data, for checks that load no tokenizer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from rlflow.author.columns import CONVERSATION, Kind, field_column, standard_kind, text
from rlflow.data import records
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.faults import Room, refused
from rlflow.data.hub_names import hub_data
from rlflow.data.json_fields import NOTHING, Wanted
from rlflow.data.paths import is_task
from rlflow.data.source import TRIED, Reading, read_data
from rlflow.errors import PlanError


class Undecided(Exception):
    """Only records that a check does not read decide whether a run accepts the data."""


def open_first(
    spec: str | os.PathLike[str],
    *,
    fields: Mapping[str, str | None] | None = None,
    columns: Mapping[str, Kind] | None = None,
    wanted: Wanted = NOTHING,
    max_records: int | None = None,
    stream: bool = False,
    split: str | None = None,
    task: Mapping[str, Any] | None = None,
    seed: int = 0,
    bad: Literal["stop", "skip"] = "stop",
    completions: bool = False,
    evaluates: bool = False,
    **encoding: object,
) -> Dataset:
    """Return the first TRIED records of a file or folder, or one question of a reasoning-gym task.

    The arguments are those of ``open_data``; ``encoding`` is ignored. Raises PlanError as ``open_data`` does,
    and also if no record is usable. Raises Undecided if later records decide, and for data on the Hub.
    """
    name = os.path.expanduser(os.fspath(spec))
    if not is_task(name) and hub_data(name) is not None:
        raise Undecided
    reading = Reading(
        fields or {},
        columns or {},
        wanted,
        split,
        task or {},
        seed,
        bad,
        completions,
        evaluates,
        max_records,
        stream,
        limit=TRIED,
    )
    try:
        data = read_data(name, reading)
        if not data["records"]:
            raise refused(data["name"], data["faults"], len(data["faults"]), Room())
    except PlanError:
        if bad == "skip" and _has_more(name, reading):
            raise Undecided from None
        raise
    if bad == "skip" and _lacks(data, wanted) and _has_more(name, reading):
        raise Undecided
    if wanted.conversation:
        data["declared"] = {**data["declared"], CONVERSATION: text}
    return Dataset(**data, encoder=ByteEncoder(), model_prompt=wanted.model_prompt)


def _lacks(data: Mapping[str, Any], wanted: Wanted) -> bool:
    """Whether no record has a field that a reward requires, other than the standard columns."""
    required = [name for name, needed in wanted.names.items() if needed and standard_kind(name) is None]
    return any(not {name, field_column(name)} & {*data["declared"]} for name in required)


def _has_more(name: str, reading: Reading) -> bool:
    """Whether a file or folder has more lines than a check reads. Raises PlanError if it cannot be read."""
    if is_task(name):
        return False
    source = records.opened(Path(name))
    if reading.max_records is not None:
        source = source.limited(reading.max_records)
    chosen = source.chosen(reading.split, reading.usual_split)
    return next(islice(source.items(chosen), reading.limit, None), None) is not None
