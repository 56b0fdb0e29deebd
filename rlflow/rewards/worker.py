"""A reward worker: one process that loads scorers and scores rows, one reply per row, which says of which. It ends with its parent.

Run as ``python -m rlflow.rewards.worker PARENT REPLIES``: the parent's process id and the descriptor that replies go to.
Requests come on standard input. Both are moved out of reach, so that what user code reads or prints cannot disturb them.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from rlflow.rewards import frames, scorers
from rlflow.watchdog import kin

BUILT_IN_MEMORY = 4 << 30  # bytes that a parser may take beyond what the process has: 9**9**9 must not take the machine
MESSAGE = 2000  # characters of an error that are sent


def main() -> None:
    parent, replies = int(sys.argv[1]), int(sys.argv[2])
    kin.die_with(parent)
    requests = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.set_inheritable(replies, False)
    Worker(replies).serve(requests)


class Worker:
    """Holds the scorers that were loaded, by key."""

    def __init__(self, replies: int) -> None:
        self._replies = replies
        self._scorers: dict[str, tuple[str, scorers.Score]] = {}

    def serve(self, requests: int) -> None:
        """Answer requests until their end."""
        reader = frames.Reader(limit=1 << 32)
        while data := os.read(requests, 1 << 20):
            reader.feed(data)
            while (body := reader.next()) is not None:
                self._answer(frames.unpacked(body))

    def _answer(self, request: dict[str, Any]) -> None:
        """A child that a function forks, and that comes back from it, ends: this process alone replies."""
        number = request["number"]
        if "load" in request:
            with kin.here_alone():
                reply = self._load(request["key"], request["load"])
            self._reply(frames.reply(number, frames.WHOLE, reply))
            return
        self._reply(frames.reply(number, frames.WHOLE, {"ready": True}))
        kind, scorer = self._scorers[request["key"]]
        with _memory(kind):
            for place, row in enumerate(request["rows"]):
                with kin.here_alone():
                    score = _scored(scorer, dict(zip(request["names"], row, strict=True)))
                self._reply(frames.reply(number, place, score))

    def _load(self, key: str, described: dict[str, Any]) -> dict[str, Any]:
        try:
            self._scorers[key] = (described["kind"], scorers.build(described["kind"], described["settings"]))
        except BaseException as error:  # a user's file may raise anything, SystemExit included
            return {"failed": _told(error), "line": _line(error, described["settings"].get("file", ""))}
        return {"loaded": key}

    def _reply(self, message: Any) -> None:
        rest = memoryview(frames.packed(message))
        while rest:
            rest = rest[os.write(self._replies, rest) :]


def _scored(scorer: scorers.Score, row: dict[str, Any]) -> Any:
    """A number, or [cause, message] for a missing one."""
    try:
        return _number(scorer(**row))
    except BaseException as error:  # as above
        return ["raised", _told(error)]


def _number(value: Any) -> Any:
    if value is None:
        return ["none", "the function returned None"]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return ["type", f"the function returned {type(value).__name__}, not a number{_instead(value)}"]
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return number if math.isfinite(number) else ["nan", f"the function returned {number}"]


def _instead(value: Any) -> str:
    """What to return in place of what other programs take."""
    if isinstance(value, dict):
        scores = [repr(name) for name, each in value.items() if isinstance(each, numbers.Real)]
        return f": return one of its numbers, such as the one under {scores[0]}" if scores else ""
    if isinstance(value, list | tuple):
        return ": it is called for one row, and gives the number of that row"
    return ": call asyncio.run inside of a plain function" if inspect.iscoroutine(value) else ""


@contextlib.contextmanager
def _memory(kind: str) -> Iterator[None]:
    """Bound what a built-in scorer may allocate. User functions are not bounded: they may hold a model."""
    if kind == "function" or sys.platform != "linux":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as sizes:
        limit = int(sizes.read().split()[0]) * resource.getpagesize() + BUILT_IN_MEMORY
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _told(error: BaseException) -> str:
    """The error with where it was raised, cut to a length that can be sent."""
    frames_ = traceback.extract_tb(error.__traceback__)
    where = f"{frames_[-1].filename}:{frames_[-1].lineno}: " if frames_ else ""
    try:
        return f"{where}{type(error).__name__}: {error}"[:MESSAGE]
    except Exception:  # an error whose own text cannot be made
        return f"{where}{type(error).__name__}"


def _line(error: BaseException, file: str) -> int:
    """The last line of the user's file that the error went through."""
    if isinstance(error, SyntaxError):
        return error.lineno or 1
    return next((frame.lineno or 1 for frame in reversed(traceback.extract_tb(error.__traceback__)) if frame.filename == file), 1)


if __name__ == "__main__":
    main()
