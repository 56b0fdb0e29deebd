"""The signature of a stage or loss: positional parameters are columns, keyword-only parameters are settings."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlflow.author.columns import Kind, standard_kind

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class ColumnParameter:
    """A positional parameter of a stage or loss. Its name is the column that the function reads.

    ``kind`` is the kind that the function expects, or None for any. If ``optional``, the batch doesn't have
    to have the column.
    """

    name: str
    kind: Kind | None
    optional: bool


@dataclass(frozen=True)
class Signature:
    """The columns and settings that a stage or loss takes."""

    columns: tuple[ColumnParameter, ...]
    settings: dict[str, Any]  # name → default, or REQUIRED
    open_settings: bool = False  # True if the function takes settings of any name (``**settings``)
    types: dict[str, Any] = field(default_factory=dict)  # name → annotation; only annotated settings

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the columns that the function reads, in order."""
        return tuple(column.name for column in self.columns)

    def takes_float(self, setting: str) -> bool:
        """Return True if the setting accepts any float.

        This is decided by its annotation, or if there is none, by its default. A setting with neither, or
        with the default None, accepts any float.
        """
        if setting in self.types:
            return float in _parts(self.types[setting])
        default = self.settings.get(setting)
        return default is None or default is REQUIRED or isinstance(default, float)


def read(function: Callable[..., Any], skip: int = 0) -> Signature:
    """Return the columns and settings that a function takes, ignoring its first ``skip`` parameters.

    Raises TypeError if it takes ``*args``.
    """
    parameters = list(inspect.signature(function).parameters.values())
    hints = _hints(function)
    columns, settings, opened = [], {}, False
    for parameter in parameters[skip:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(
                f"{function.__name__}: '*{parameter.name}' does not name a column; write each column as a "
                "parameter"
            )
        if parameter.kind is parameter.VAR_KEYWORD:
            opened = True
        elif parameter.kind is parameter.KEYWORD_ONLY:
            settings[parameter.name] = parameter.default
        else:
            columns.append(_column(parameter, hints.get(parameter.name)))
    return Signature(
        tuple(columns), settings, opened, {name: hints[name] for name in settings if name in hints}
    )


def _parts(hint: Any) -> set[Any]:
    """Return the types that an annotation allows, taking unions apart and ignoring ranges."""
    if typing.get_origin(hint) is typing.Annotated:
        return _parts(typing.get_args(hint)[0])
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return set().union(*map(_parts, typing.get_args(hint)))
    return {hint}


def _column(parameter: inspect.Parameter, hint: Any) -> ColumnParameter:
    kind = hint if isinstance(hint, Kind) else standard_kind(parameter.name)
    return ColumnParameter(parameter.name, kind, parameter.default is None)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    # an annotation that only type checkers can resolve is not an error here
    except (NameError, SyntaxError, TypeError, AttributeError):
        return typing.cast("dict[str, Any]", getattr(function, "__annotations__", {}))
