"""Converts Python values to JSON types and back without loss.

Tuples, sets, and mappings with keys other than text are marked, so that they can be restored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlflow.errors import PlanError


def frozen(value: Any) -> Any:
    """Convert a value to JSON types, from which ``thawed`` restores an equal value.

    Raises PlanError for an unsupported type.
    """
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [frozen(item) for item in value]
    if isinstance(value, tuple):
        return {"__tuple__": [frozen(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {"__set__": [frozen(item) for item in value]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and not key.startswith("__") for key in value):
            return {key: frozen(item) for key, item in value.items()}
        return {"__dict__": [[frozen(key), frozen(item)] for key, item in value.items()]}
    raise PlanError.of(
        "task-entry",
        "a reasoning-gym entry contains a value that cannot be written as JSON",
        found=type(value).__name__,
        expected="numbers, text, and lists, tuples, sets and mappings of them",
        remedy="use another task: rlflow cannot store the entries of this one",
    )


def thawed(value: Any) -> Any:
    """Restore the value that was passed to ``frozen``."""
    if isinstance(value, list):
        return [thawed(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"__tuple__": items}:
            return tuple(thawed(items))
        case {"__set__": items}:
            return set(thawed(items))
        case {"__dict__": items}:
            return {thawed(key): thawed(item) for key, item in items}
    return {key: thawed(item) for key, item in value.items()}
