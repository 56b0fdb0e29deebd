"""Where calls and definitions are in user code, and digests of functions."""

from __future__ import annotations

import ast
import hashlib
import inspect
import os
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, cast

from rlflow.errors import Place

_STANDARD = os.path.dirname(os.__file__) + os.sep
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def call_place() -> Place | None:
    """Return the line of user code that led to this call, or None if there is no user code on the stack."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and not _is_user_code(frame):
        frame = frame.f_back
    if frame is None:
        return None
    line = _lines(frame.f_code)[frame.f_lasti // 2] or frame.f_lineno
    return Place(frame.f_code.co_filename, line)


def _is_user_code(frame: types.FrameType) -> bool:
    """Return True if a frame runs user code rather than rlflow or a library that rlflow called."""
    name, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
    if name.partition(".")[0] in ("rlflow", "torch", "numpy", "typer", "click"):
        return name.startswith("rlflow.algorithms.")
    return "site-packages" in path or not path.startswith((_STANDARD, "<frozen"))


@lru_cache(maxsize=256)
def _lines(code: types.CodeType) -> list[int | None]:
    return [position[0] for position in code.co_positions()]


def definition_place(function: Callable[..., Any]) -> Place:
    """Return the file and line of a function's ``def``, or of its first decorator if it has one."""
    code = inspect.unwrap(function).__code__
    return Place(code.co_filename, code.co_firstlineno)


@lru_cache(maxsize=1024)
def digest(function: Callable[..., Any]) -> str:
    """Return 12 hex digits that identify what a function computes.

    They depend on its code without comments and docstrings, on its defaults, and on the functions, classes
    and constants that it uses from its own file. Equal functions in different files have equal digests.
    """
    parts = sorted(set(_meaning(cast("types.FunctionType", inspect.unwrap(function)), set())))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def _meaning(function: types.FunctionType, visited: set[int]) -> Iterator[str]:
    if id(function) in visited:
        return
    visited.add(id(function))
    yield _syntax(function)
    named = {"defaults": function.__defaults__, **(function.__kwdefaults__ or {}), **_names(function)}
    for name, value in named.items():
        value = _unwrapped(value)
        if (
            isinstance(value, types.FunctionType)
            and value.__code__.co_filename == function.__code__.co_filename
        ):
            yield from _meaning(value, visited)
        elif isinstance(value, type) and value.__module__ == function.__module__:
            yield _syntax(value)
        elif (constant := _constant(value)) is not None:
            yield f"{name}={constant}"


def _unwrapped(value: Any) -> Any:
    """Return the function inside a stage, a loss or a cached function, or any other value as is.

    Only ``__dict__`` is read, so this never runs the code of dynamic attributes.
    """
    while "__wrapped__" in (own := getattr(value, "__dict__", {})):
        value = own["__wrapped__"]
    return value


def _names(function: types.FunctionType) -> dict[str, Any]:
    """Return the globals and captured variables that a function uses, as name → value.

    Those used by functions nested inside it are included.
    """
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    captured = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    values = {name: function.__globals__[name] for name in sorted(names) if name in function.__globals__}
    return values | {name: cell.cell_contents for name, cell in captured.items() if cell != types.CellType()}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _constant(value: Any) -> str | None:
    """Return a plain value as text that is the same in every process, or None for other values."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dict):
        value = [item for pair in value.items() for item in pair]
    elif isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if not isinstance(value, list | tuple):
        return None
    parts = [_constant(item) for item in value]
    return None if None in parts else f"[{', '.join(map(str, parts))}]"


def _syntax(thing: types.FunctionType | type) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    # for functions typed into a console, or that are a part of a line, only compiled code is available
    except (OSError, TypeError, SyntaxError):
        code = getattr(thing, "__code__", None)
        return repr((code.co_code, code.co_names, _shown(code))) if code else thing.__qualname__
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            node.body = node.body[1:] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.decorator_list = []
    return ast.dump(tree)


def _shown(code: types.CodeType) -> list[Any]:
    """Return the constants of compiled code, leaving out the memory addresses of nested code."""
    return [(c.co_code, _shown(c)) if isinstance(c, types.CodeType) else c for c in code.co_consts]
