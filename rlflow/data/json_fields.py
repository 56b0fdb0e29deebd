"""Fields of records that rewards read: each in a text column of its own, as JSON, from which a reward gets
the value back."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.author.columns import FIELD, field_column

# name → fields that it is looked up as
OTHER_NAMES = {"ground_truth": ("ground_truth", "reward_model.ground_truth")}
ABSENT = ""  # the text of a record that has not the field; never JSON


@dataclass(frozen=True)
class Wanted:
    """The names under which rewards may ask for fields of the data."""

    names: Mapping[str, bool] = field(default_factory=dict)  # name → whether every record must have its field
    everything: bool = False  # whether all fields are wanted
    model_prompt: bool = False  # whether rows must have the column MODEL_PROMPT

    @property
    def any(self) -> bool:
        """Whether a field may be wanted at all."""
        return self.everything or bool(self.names)


NOTHING = Wanted()


@dataclass(frozen=True)
class JsonFields:
    """The fields that are carried for rewards."""

    columns: Mapping[str, str] = field(default_factory=dict)  # column → field of the file
    required: Collection[str] = ()  # columns whose field every record must have


def choose_fields(
    records: Sequence[Mapping[str, Any]],
    wanted: Wanted,
    chosen: Mapping[str, str | None],
    columns: Collection[str],
) -> JsonFields:
    """Decide which fields to carry: those that one record or more has. ``chosen``: name → field as the user
    maps it. ``columns``: names that are columns of the data, which rewards read instead."""
    names = dict(wanted.names)
    if wanted.everything:
        names |= {str(name): False for record in records for name in record if name not in names}
    sources = {name: _source(records, name, chosen) for name in names if name not in columns}
    fields = {name: source for name, source in sources.items() if source}
    return JsonFields(
        {field_column(name): source for name, source in fields.items()},
        frozenset(field_column(name) for name in fields if names[name]),
    )


def _source(records: Sequence[Mapping[str, Any]], name: str, chosen: Mapping[str, str | None]) -> str | None:
    """The field that a name is read from; None where no record has it."""
    candidates = (chosen[name],) if name in chosen else OTHER_NAMES.get(name, (name,))
    return next(
        (source for source in candidates if source and any(present(record, source) for record in records)),
        None,
    )


def present(record: Mapping[str, Any], name: str) -> bool:
    """Whether a record has a field, or by a dotted name one inside another."""
    try:
        value_of(record, name)
    except KeyError:
        return False
    return True


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """The value of a field, or of one inside another by a dotted name (reward_model.ground_truth). Raises
    KeyError where it is missing."""
    if name in record:
        return record[name]
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise KeyError(name)
        value = value[step]
    return value


def packed(record: Mapping[str, Any], name: str) -> str:
    """The field's value as JSON; ABSENT where the record has not the field. What JSON has no form for, such
    as a date, becomes text."""
    return json.dumps(value_of(record, name), default=str) if present(record, name) else ABSENT


def given_back(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's values by the names that a reward uses: those of fields are made of their JSON, and left out
    where the record has none."""
    values = {}
    for name, value in row.items():
        if not name.startswith(FIELD):
            values[name] = value
        elif value != ABSENT:
            values[name.removeprefix(FIELD)] = json.loads(value)
    return values


def names_of(columns: Iterable[str]) -> tuple[str, ...]:
    """The names of the fields that are among some columns."""
    return tuple(name.removeprefix(FIELD) for name in columns if name.startswith(FIELD))
