"""Carries fields of records to reward functions.

Each field is a text column of JSON, which rlflow decodes before it calls the reward function.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.author.columns import FIELD, field_column

# Name → the fields that may contain it; the first existing field counts.
OTHER_NAMES = {"ground_truth": ("ground_truth", "reward_model.ground_truth")}
ABSENT = ""  # the text for a record without the field; not valid JSON


@dataclass(frozen=True)
class Wanted:
    """The names of the data fields that rewards may read."""

    names: Mapping[str, bool] = field(default_factory=dict)  # name → whether every record must have its field
    everything: bool = False  # True if all fields are wanted
    model_prompt: bool = False  # True if rows must have the column MODEL_PROMPT
    conversation: bool = False  # True if rows must have the column CONVERSATION

    @property
    def any(self) -> bool:
        """True if rewards may read any field."""
        return self.everything or bool(self.names)


NOTHING = Wanted()


@dataclass(frozen=True)
class JsonFields:
    """The data fields that rows carry for rewards, each as a JSON column."""

    columns: Mapping[str, str] = field(default_factory=dict)  # column → field of the file
    required: Collection[str] = ()  # columns whose field every record must have


def choose_fields(
    records: Iterable[Mapping[str, Any]],
    wanted: Wanted,
    chosen: Mapping[str, str | None],
    columns: Collection[str],
) -> JsonFields:
    """Choose the fields to carry: those that rewards may read and at least one record has.

    ``chosen``: the field that the user maps to each name. ``columns``: names of columns in the data. A reward
    that asks for one of these gets the column, so no field is carried for it.
    """
    names = dict(wanted.names)
    sought = {source for name in [*names, *OTHER_NAMES] for source in _candidates(name, chosen)}
    found: set[str] = set()
    for record in records:
        found |= {source for source in sought - found if present(record, source)}
        if wanted.everything:
            names |= {str(name): False for name in record if name not in names}
            found.update(map(str, record))
        elif sought <= found:
            break
    sources = {
        name: next((source for source in _candidates(name, chosen) if source in found), None)
        for name in names
        if name not in columns
    }
    fields = {name: source for name, source in sources.items() if source}
    return JsonFields(
        {field_column(name): source for name, source in fields.items()},
        frozenset(field_column(name) for name in fields if names[name]),
    )


def _candidates(name: str, chosen: Mapping[str, str | None]) -> tuple[str, ...]:
    """Return the fields that can supply ``name``: the one the user maps to it, or else its other names."""
    if name in chosen:
        return tuple(filter(None, [chosen[name]]))
    return OTHER_NAMES.get(name, (name,))


def present(record: Mapping[str, Any], name: str) -> bool:
    """True if a record has a field. A dotted name such as reward_model.ground_truth names a nested field."""
    try:
        value_of(record, name)
    except KeyError:
        return False
    return True


def value_of(record: Mapping[str, Any], name: str) -> Any:
    """Return the value of a field. A dotted name such as reward_model.ground_truth names a nested field.

    Raises KeyError if the field is missing.
    """
    if name in record:
        return record[name]
    value: Any = record
    for step in name.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise KeyError(name)
        value = value[step]
    return value


def packed(record: Mapping[str, Any], name: str) -> str:
    """Return the field's value as JSON, or ABSENT if the record lacks the field.

    A value that JSON doesn't support, such as a date, becomes text.
    """
    return json.dumps(value_of(record, name), default=str) if present(record, name) else ABSENT


def given_back(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row's values under the names that a reward function uses.

    Carried fields are decoded from JSON, and fields that the record lacks are left out.
    """
    values = {}
    for name, value in row.items():
        if not name.startswith(FIELD):
            values[name] = value
        elif value != ABSENT:
            values[name.removeprefix(FIELD)] = json.loads(value)
    return values


def names_of(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the data fields carried in these columns."""
    return tuple(name.removeprefix(FIELD) for name in columns if name.startswith(FIELD))
