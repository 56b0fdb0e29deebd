"""The lines of the user's own files that an exception went through: what its author can change.

Exceptions cross processes without their tracebacks. What a worker raised is therefore written into a
``RemoteFailure`` where it is raised.
"""

from __future__ import annotations

import linecache
import os
import traceback
import types
from pathlib import Path

from rlflow.errors import FlowError, Place, PlanError, RemoteError, RemoteFailure, SkipIteration, Stopped

LAST = 3  # lines that a message names, of those nearest to the error
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = ("site-packages", "dist-packages")
_OURS = str(Path(__file__).parents[1]) + os.sep  # rlflow


def own_lines(error: BaseException) -> tuple[str, ...]:
    """``path:line, in function: source`` of the last lines that are the user's, the one nearest to the error
    first; none where what raised was called by no line of the user's."""
    return tuple(_line(frame, line) for frame, line in _own(error)[: -LAST - 1 : -1])


def own_place(error: BaseException) -> str:
    """``path:line`` of the user's line nearest to the error, or else of the line that raised."""
    frames = _own(error) or list(traceback.walk_tb(error.__traceback__))
    return f"{frames[-1][0].f_code.co_filename}:{frames[-1][1]}" if frames else ""


def _own(error: BaseException) -> list[tuple[types.FrameType, int]]:
    return [each for each in traceback.walk_tb(error.__traceback__) if _users(each[0])]


# errors that say themselves what is wrong and where
AS_THEY_ARE = (FlowError, PlanError, RemoteError, SkipIteration, Stopped)


class RaisedElsewhere(Exception):
    """Brings the record of an exception to the process that asked."""

    def __init__(self, failure: RemoteFailure) -> None:
        super().__init__(failure)
        self.failure = failure


def failure_of(error: BaseException) -> RemoteFailure:
    """The record of an exception of this process, with the user's lines and with notes that show its whole
    traceback."""
    notes = (*getattr(error, "__notes__", ()), in_worker(error))
    return RemoteFailure(type(error).__name__, str(error), own_lines(error), notes)


def portable(error: Exception) -> Exception:
    """What another process gets of an exception: an error of rlflow as it is, the record of any other."""
    return error if isinstance(error, (RaisedElsewhere, *AS_THEY_ARE)) else RaisedElsewhere(failure_of(error))


def in_worker(error: BaseException) -> str:
    """The note on an exception for another process, which does not get its traceback."""
    return f"in a worker:\n{whole(error).rstrip()}"


def whole(error: BaseException) -> str:
    """The whole traceback, with causes and notes."""
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
