"""Reading a user function's signature: positional parameters name columns, keyword-only ones are settings."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlflow.columns import Kind, standard_kind

REQUIRED = inspect.Parameter.empty


@dataclass(frozen=True)
class ColumnParameter:
    """A positional parameter: the column it reads, the kind it expects (None: any) and whether the column may be absent."""

    name: str
    kind: Kind | None
    optional: bool


@dataclass(frozen=True)
class Signature:
    """Columns and settings of a stage or a loss. ``settings`` maps a name to its default or REQUIRED."""

    columns: tuple[ColumnParameter, ...]
    settings: dict[str, Any]
    open_settings: bool = False

    @property
    def column_names(self) -> tuple[str, ...]:
        """The names of the columns, in order."""
        return tuple(column.name for column in self.columns)


def read(function: Callable[..., Any], skip: int = 0) -> Signature:
    """The signature without its first ``skip`` parameters. Raises TypeError for ``*args``."""
    parameters = list(inspect.signature(function).parameters.values())
    hints = _hints(function)
    columns, settings, opened = [], {}, False
    for parameter in parameters[skip:]:
        if parameter.kind is parameter.VAR_POSITIONAL:
            raise TypeError(f"{function.__name__}: '*{parameter.name}' names no column; write each column as a parameter")
        if parameter.kind is parameter.VAR_KEYWORD:
            opened = True
        elif parameter.kind is parameter.KEYWORD_ONLY:
            settings[parameter.name] = parameter.default
        else:
            columns.append(_column(parameter, hints.get(parameter.name)))
    return Signature(tuple(columns), settings, opened)


def _column(parameter: inspect.Parameter, hint: Any) -> ColumnParameter:
    kind = hint if isinstance(hint, Kind) else standard_kind(parameter.name)
    return ColumnParameter(parameter.name, kind, parameter.default is None)


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    try:
        return inspect.get_annotations(function, eval_str=True)
    except (NameError, SyntaxError, TypeError, AttributeError):  # hints for type checkers alone are not ours to judge
        return typing.cast(dict[str, Any], getattr(function, "__annotations__", {}))
