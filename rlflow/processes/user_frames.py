"""The lines of the user's own files that an exception went through: what its author can change.

Exceptions cross processes without their tracebacks. What a worker raised is therefore noted on the exception itself, where it is raised.
"""

from __future__ import annotations

import contextlib
import copy
import linecache
import os
import traceback
import types
from pathlib import Path

from rlflow.errors import Place

LAST = 3  # lines that a message names, of those nearest to the error
NOTED = "_rlflow_lines"  # attribute of an exception from another process
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_OURS = str(Path(__file__).parents[1]) + os.sep  # rlflow


def own_lines(error: BaseException) -> tuple[str, ...]:
    """``path:line, in function: source`` of the last lines that are the user's, the one nearest to the error first; none where what raised
    was called by no line of the user's."""
    if noted(error):
        return noted_lines(error)
    return tuple(_line(frame, line) for frame, line in _own(error)[: -LAST - 1 : -1])


def own_place(error: BaseException) -> str:
    """``path:line`` of the user's line nearest to the error, or else of the line that raised."""
    frames = _own(error) or list(traceback.walk_tb(error.__traceback__))
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""


def _own(error: BaseException) -> list[tuple[types.FrameType, int]]:
    return [each for each in traceback.walk_tb(error.__traceback__) if _users(each[0])]


class RaisedElsewhere(Exception):
    """Stands for an exception that loses what is noted on it on its way to another process. Its text says of which type it was."""


def portable(error: Exception) -> Exception:
    """The exception, or one that stands for it, with its lines and its whole traceback noted so that another process finds them."""
    if noted(error):
        return error
    lines, text = own_lines(error), whole(error)
    setattr(error, NOTED, lines)
    error.add_note(f"in a worker:\n{text.rstrip()}")
    with contextlib.suppress(Exception):  # user's exceptions may fail in any way as they are copied
        if noted(copy.copy(error)):
            return error
    other = RaisedElsewhere(described(error))
    carry(error, other)
    return other


def described(error: BaseException) -> str:
    """``type: text``, once."""
    return str(error) if isinstance(error, RaisedElsewhere) else f"{type(error).__name__}: {error}"


def noted(error: BaseException) -> bool:
    """Whether the exception is from another process, which noted its lines on it."""
    return hasattr(error, NOTED)


def noted_lines(error: BaseException) -> tuple[str, ...]:
    """The lines that another process noted; none for an exception of this one."""
    return tuple(getattr(error, NOTED, ()))


def carry(error: BaseException, to: BaseException) -> None:
    """Write on one exception what is noted on another that it stands for."""
    if noted(error):
        setattr(to, NOTED, noted_lines(error))
        for each in getattr(error, "__notes__", ()):
            to.add_note(each)


def whole(error: BaseException) -> str:
    """The whole traceback, with causes and with what workers noted."""
    return "".join(traceback.format_exception(error))


def _users(frame: types.FrameType) -> bool:
    path, name = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
    if name.startswith("rlflow.algorithms."):
        return True
    ours = path.startswith(_OURS) or name.startswith("rlflow.")
    return not (ours or path.startswith((_STANDARD, "<frozen")) or any(each in path for each in _INSTALLED))


def _line(frame: types.FrameType, line: int) -> str:
    path = frame.f_code.co_filename
    place, function = Place(path, line), frame.f_code.co_name
    source = _source(path, line, frame)
    return f"{place}, in {function}" + (f": {source}" if source else "")


def _source(path: str, line: int, frame: types.FrameType) -> str:
    return linecache.getline(path, line, frame.f_globals).strip()
