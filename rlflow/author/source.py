"""Where user code stands and what it says: places of calls, places of definitions, digests of function sources."""

from __future__ import annotations

import ast
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

from rlflow.errors import Place


def call_place() -> Place | None:
    """First line of the call, in user code, that led here."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _ours(frame):
        frame = frame.f_back
    if frame is None:
        return None
    line = _lines(frame.f_code)[frame.f_lasti // 2] or frame.f_lineno
    return Place(frame.f_code.co_filename, line)


def _ours(frame: types.FrameType) -> bool:
    name = frame.f_globals.get("__name__", "")
    return name.partition(".")[0] == "rlflow" and not name.startswith("rlflow.algorithms.")


@lru_cache(maxsize=256)
def _lines(code: types.CodeType) -> list[int | None]:
    return [position[0] for position in code.co_positions()]


def definition_place(function: Callable[..., Any]) -> Place:
    """The line of `def` (or of the first decorator) of a function."""
    code = inspect.unwrap(function).__code__
    return Place(code.co_filename, code.co_firstlineno)


@lru_cache(maxsize=1024)
def digest(function: Callable[..., Any]) -> str:
    """12 hex digits over what the function does: its syntax without comments and docstrings, its defaults, and the same of
    the plain functions and constants of its own file that it names. Equal bodies in two files have equal digests."""
    parts = sorted(set(_meaning(inspect.unwrap(function), set())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _meaning(function: Callable[..., Any], seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    yield _syntax(function)
    for name, value in _names(function):
        if isinstance(value, types.FunctionType) and value.__code__.co_filename == function.__code__.co_filename:
            yield from _meaning(value, seen)
        elif isinstance(value, bool | int | float | str | bytes | tuple | None):
            yield f"{name}={value!r}"


def _names(function: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    captured = inspect.getclosurevars(function)
    yield from captured.globals.items()
    yield from captured.nonlocals.items()


def _syntax(function: Callable[..., Any]) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # defined in a console: the compiled code is all there is
        return repr((function.__code__.co_code, function.__code__.co_consts))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
            if ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)
