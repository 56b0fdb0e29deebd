"""The settings dataclass of a flow: fields, comments, ranges, values from text, and variants for `check`."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import math
import textwrap
import tokenize
import types
import typing
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.errors import Place, PlanError, Problem, listed, nearest


@dataclass(frozen=True)
class Field:
    """A field of a settings dataclass: its type, default, comment and place in the file.

    ``comment`` is the comment at the end of the field's line, or otherwise the comment lines directly above.
    """

    name: str
    type: Any
    default: Any
    comment: str
    place: Place | None


# Cache of the comments of each class: finding a class in its file means parsing the file.
_read: weakref.WeakKeyDictionary[type, dict[str, tuple[Place | None, str]]] = weakref.WeakKeyDictionary()


def fields(settings: type) -> dict[str, Field]:
    """Return the fields of a settings dataclass in order, as name → field."""
    comments = _comments(settings)
    hints = typing.get_type_hints(settings, include_extras=True)
    entries = {}
    for entry in dataclasses.fields(settings):
        place, comment = comments.get(entry.name, (None, ""))
        default = (
            entry.default_factory() if entry.default_factory is not dataclasses.MISSING else entry.default
        )
        entries[entry.name] = Field(entry.name, hints[entry.name], default, comment, place)
    return entries


def _comments(settings: type) -> dict[str, tuple[Place | None, str]]:
    """Return each field's place and comment, by name. Fields of base classes are included."""
    comments: dict[str, tuple[Place | None, str]] = {}
    for owner in reversed(settings.__mro__):
        if dataclasses.is_dataclass(owner):
            if owner not in _read:
                _read[owner] = _own_comments(owner)
            comments |= _read[owner]
    return comments


def _own_comments(settings: type) -> dict[str, tuple[Place | None, str]]:
    try:
        lines, start = inspect.getsourcelines(settings)
        source = textwrap.dedent("".join(lines))
        tree = ast.parse(source).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    remarks = {token.start[0]: token.string.lstrip("#:").strip() for token in tokens}
    alone = {token.start[0] for token in tokens if token.line.lstrip().startswith("#")}
    path = inspect.getsourcefile(settings) or ""
    comments: dict[str, tuple[Place | None, str]] = {}
    for node in getattr(tree, "body", ()):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            own = [remarks[row] for row in range(node.lineno, (node.end_lineno or 0) + 1) if row in remarks][
                :1
            ]
            above = node.lineno
            while above - 1 in alone:
                above -= 1
            comments[node.target.id] = (
                Place(path, start + node.lineno - 1),
                " ".join(own or [remarks[row] for row in range(above, node.lineno)]),
            )
    return comments


def override_flow(settings: Any, changes: Mapping[str, Any]) -> Any:
    """Like ``override``, for the settings of a flow.

    Non-finite numbers are refused, unless the setting's own default is non-finite.
    """
    return override(settings, changes, "hp.", finite=True)


def override(settings: Any, changes: Mapping[str, Any], prefix: str, finite: bool = False) -> Any:
    """Return a copy of the dataclass instance ``settings`` with ``changes`` applied.

    Text is parsed, and ranges are checked.

    prefix: what messages put before the names of settings. finite: refuse non-finite numbers, unless the
    setting's own default is non-finite. All unknown names and unsuitable values are raised together, as one
    PlanError.
    """
    known = fields(type(settings))
    problems = [_unknown(name, known, prefix) for name in changes if name not in known]
    values = {name: getattr(settings, name) for name in known} | {
        name: value for name, value in changes.items() if name in known
    }
    parsed = {}
    for name, value in values.items():
        try:
            parsed[name] = parse(known[name].type, value)
            if finite and _infinite(parsed[name]) and not _infinite(known[name].default):
                raise ValueError(f"{described(known[name].type)}: input should be finite")
        except PlanError as error:
            problems += error.problems
        except ValueError as error:
            place = known[name].place if name not in changes else None
            problems.append(
                Problem(
                    "setting-range",
                    f"the setting '{prefix}{name}' does not fit",
                    place,
                    found=repr(value),
                    expected=str(error),
                    remedy=f"change --{prefix}{name}" if not place else "change the default",
                    setting=f"{prefix}{name}" if not place else "",
                )
            )
    PlanError.refuse(problems)
    try:
        return type(settings)(**parsed)
    except PlanError:  # the class raised its own complete error
        raise
    except Exception as error:  # a __post_init__ may raise anything
        raise PlanError.of(
            "setting-range",
            f"the settings do not fit together: {error}",
            found=str(parsed),
            expected=f"settings that {type(settings).__name__} accepts",
            remedy=f"change --{prefix}…",
        ) from error


def _infinite(value: Any) -> bool:
    """Return True if ``value`` is or contains a non-finite number."""
    return (
        any(map(_infinite, value))
        if isinstance(value, tuple | list)
        else isinstance(value, float) and not math.isfinite(value)
    )


def _unknown(name: str, known: Mapping[str, Field], prefix: str) -> Problem:
    return Problem(
        "unknown-setting",
        f"unknown setting '{prefix}{name}'",
        found=name,
        setting=f"{prefix}{name}",
        expected=f"one of {listed(known)}",
        nearest=nearest(name, known),
        remedy="see --help for all settings with their defaults",
    )


def parse(type_: Any, value: Any) -> Any:
    """Convert ``value``, which may be text, to the annotated type.

    If that's impossible, raises ValueError with the expected type and range.
    """
    from pydantic import ValidationError
    from pydantic.errors import PydanticSchemaGenerationError

    if isinstance(value, str) and value.lower() in ("none", "null") and _optional(type_):
        value = None
    try:
        adapter = _adapter(type_)
        parsed = adapter.validate_strings(value) if isinstance(value, str) else adapter.validate_python(value)
    except PydanticSchemaGenerationError:  # a type that the author defined: its values cannot be checked
        return value
    except ValidationError as error:
        reasons = "; ".join(
            dict.fromkeys(detail["msg"][0].lower() + detail["msg"][1:] for detail in error.errors())
        )
        raise ValueError(f"{described(type_)}: {reasons}") from None
    if isinstance(parsed, float) and math.isnan(parsed):
        raise ValueError(f"{described(type_)}: input should be a number")
    if isinstance(parsed, int) and not -(2**63) <= parsed < 2**63:
        raise ValueError(f"{described(type_)}: input should fit into 64 bits")
    return parsed


@functools.lru_cache(maxsize=256)
def _adapter(type_: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(type_)


def _optional(type_: Any) -> bool:
    base = typing.get_args(type_)[0] if typing.get_origin(type_) is typing.Annotated else type_
    return type(None) in typing.get_args(base)


def described(type_: Any) -> str:
    """Describe a type and its range, for example ``float > 0``."""
    if typing.get_origin(type_) is typing.Annotated:
        base, *limits = typing.get_args(type_)
        signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
        ranges = [
            f"{signs[key]} {value}" for limit in limits for key, value in _limits(limit) if key in signs
        ]
        return " ".join([described(base), " and ".join(ranges)]).strip()
    if typing.get_origin(type_) is Literal:
        return " | ".join(repr(choice) for choice in typing.get_args(type_))
    if isinstance(type_, types.UnionType) or typing.get_origin(type_) is typing.Union:
        return " | ".join(described(part) for part in typing.get_args(type_))
    if isinstance(type_, type) and issubclass(type_, str):
        return "str"
    return "None" if type_ is type(None) else getattr(type_, "__name__", str(type_))


def _limits(limit: Any) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(limit):
        yield from ((entry.name, getattr(limit, entry.name)) for entry in dataclasses.fields(limit))


def variants(settings: Any) -> Iterator[tuple[str, Any]]:
    """Yield (change, changed settings) for each way to change a single setting.

    Booleans are flipped, a ``Literal`` takes each of its other values, and numbers become 0 if their range
    allows it.
    """
    if settings is None:
        return
    for entry in fields(type(settings)).values():
        for value in _others(entry.type, getattr(settings, entry.name)):
            try:
                parse(entry.type, value)
                yield f"{entry.name}={value!r}", dataclasses.replace(settings, **{entry.name: value})
            except Exception:  # the range or a __post_init__ forbids this value
                continue


def _others(type_: Any, value: Any) -> list[Any]:
    if typing.get_origin(type_) is typing.Annotated:
        return _others(typing.get_args(type_)[0], value)
    if typing.get_origin(type_) is Literal:
        return [choice for choice in typing.get_args(type_) if choice != value]
    if isinstance(type_, types.UnionType) or typing.get_origin(type_) is typing.Union:
        others = [other for part in typing.get_args(type_) for other in _others(part, value)]
        return [other for number, other in enumerate(others) if other not in others[:number]]
    if isinstance(value, bool):
        return [not value]
    return [type(value)(0)] if isinstance(value, int | float) and value else []
