"""Find the lines of the user's own files in a traceback, the only ones that the user can change.

An exception loses its traceback when it is sent to another process, so the process that raises it puts these
lines into a ``RemoteFailure``.
"""

from __future__ import annotations

import linecache
import os
import traceback
import types
from pathlib import Path

from rlflow.errors import FlowError, Place, PlanError, RemoteError, RemoteFailure, SkipIteration, Stopped

UNPRINTABLE = "<exception str() failed>"  # as in Python's own tracebacks
LAST = 3  # how many lines a message names, those closest to the error
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_OURS = str(Path(__file__).parents[1]) + os.sep  # the folder of rlflow


def own_lines(error: BaseException) -> tuple[str, ...]:
    """Return the last lines of the user's files in a traceback, as ``path:line, in function: source``.

    The line closest to the error comes first. Empty if the traceback has none of the user's lines.
    """
    return tuple(_line(frame, line) for frame, line in _own(error)[: -LAST - 1 : -1])


def own_place(error: BaseException) -> str:
    """Return ``path:line`` of the user's line closest to the error.

    If the traceback has none of the user's lines, this is the line that raised the error.
    """
    frames = _own(error) or list(traceback.walk_tb(error.__traceback__))
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""


def _own(error: BaseException) -> list[tuple[types.FrameType, int]]:
    return [each for each in traceback.walk_tb(error.__traceback__) if _users(each[0])]


# Errors whose message already states the fault and its place.
AS_THEY_ARE = (FlowError, PlanError, RemoteError, SkipIteration, Stopped)


class RaisedElsewhere(Exception):
    """An exception that brings the record of another process's exception to the caller."""

    def __init__(self, failure: RemoteFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.message


def failure_of(error: BaseException, hint: str = "") -> RemoteFailure:
    """Return the record of an exception, with the user's lines and the full traceback as a note.

    ``hint``: a hint to add to the record.
    """
    try:
        text = str(error)
    except Exception:  # a user's class may raise here
        text = UNPRINTABLE
    notes = (*getattr(error, "__notes__", ()), in_worker(error))
    return RemoteFailure(type(error).__name__, text, own_lines(error), notes, own_place(error), hint)


def portable(error: Exception) -> Exception:
    """Return an exception that can be sent to another process.

    rlflow's own errors are returned unchanged. Any other exception is replaced with one that carries its
    record.
    """
    return error if isinstance(error, (RaisedElsewhere, *AS_THEY_ARE)) else RaisedElsewhere(failure_of(error))


def in_worker(error: BaseException) -> str:
    """Return an exception's traceback as a note for another process, which only gets the exception."""
    return f"in a worker:\n{whole(error).rstrip()}"


def whole(error: BaseException) -> str:
    """Return an exception's full traceback as text, with its causes and notes."""
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
