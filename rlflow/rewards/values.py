"""What a reward function gave, as the message about its row: a number, alone or with others and an answer
beside it, or why there is none."""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlflow.processes.user_frames import failure_of, own_lines, own_place, whole
from rlflow.rewards.hints import hint

MESSAGE = 2000  # characters of an error that are sent
SCORE = "score"  # the key of a dictionary whose number counts
# the key of a dictionary under which is the answer that the function read out of the response, as verl names
# it
ANSWER = "pred"
LONGEST = 1000  # characters of an answer that are sent
OTHERS = 32  # most other numbers of a row that are logged
NOT_HELD = "which float32 cannot hold: scale it down"
RETURNED = "the function returned"
LARGEST = 3.4028234663852886e38  # of float32, which scores are kept in
# causes that are what was returned, so that no line of the function is in their message
OF_VALUES = ("none", "nan", "type", "overflow")
_PRINTED: set[str] = set()  # the lines of users' files whose tracebacks this process has printed
KEY = re.compile(r"[\w.@/-]{1,64}")  # keys under which they are; others are left out


def verdict(value: Any, source: str = RETURNED) -> Any:
    """The value that a reward returned for a row: a finite float, {"score": float, "others": {key: float},
    "answer": text} for a dictionary with more than its score, of which others or answer may be missing, or
    [cause, message] where there is no score. ``source``: see ``number``."""
    if not isinstance(value, Mapping):
        return number(value, source)
    if SCORE not in value:
        return ["type", f"the function returned {type(value).__name__} without '{SCORE}'{_instead(value)}"]
    score = number(value[SCORE], source)
    others, answer = dict(_others(value)), _answer(value.get(ANSWER))
    beside = ({"others": others} if others else {}) | ({"answer": answer} if answer is not None else {})
    return {"score": score, **beside} if isinstance(score, float) and beside else score


def _answer(value: Any) -> str | None:
    """An answer as text, which is what votes are counted by; None for what is neither text nor a number, and
    for no text."""
    return str(value)[:LONGEST] or None if isinstance(value, str | numbers.Real) else None


def _others(value: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    """The finite numbers of a dictionary beside its score, at most OTHERS."""
    count = 0
    for key, other in value.items():
        if (
            key != SCORE
            and isinstance(key, str)
            and KEY.fullmatch(key)
            and isinstance(beside := number(other), float)
        ):
            yield key, beside
            count += 1
            if count == OTHERS:
                return


def number(value: Any, source: str = RETURNED) -> Any:
    """The value as a finite float, or [cause, message] where it is none. ``source``: where it is from, with
    which the message begins."""
    if value is None:
        return ["none", f"{source} None"]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return [
            "type",
            f"{source} {type(value).__name__}, not a number{_instead(value) if source == RETURNED else ''}",
        ]
    try:
        score = float(value)
    except OverflowError:  # of an int
        return ["overflow", f"{source} a number beyond 1e308, {NOT_HELD}"]
    if not math.isfinite(score):
        return ["nan", f"{source} {score}"]
    return score if abs(score) <= LARGEST else ["overflow", f"{source} {score:g}, {NOT_HELD}"]


def _instead(value: Any) -> str:
    """Advice for a function that returns a dictionary, a list or a coroutine, as other programs take them."""
    if isinstance(value, Mapping):
        keys = [repr(name) for name, score in value.items() if isinstance(score, numbers.Real)]
        return f": the number under '{SCORE}' counts; name it so instead of {keys[0]}" if keys else ""
    if isinstance(value, list | tuple):
        return ": it is called for one row, and gives the number of that row"
    return ": define the function with async def" if inspect.iscoroutine(value) else ""


def raised(error: BaseException) -> list[str]:
    """The cause and message for a row whose function raised: the error's text with its place, cut to a length
    that can be sent. The whole traceback is printed, once for each line of the user's that raises: what a
    reward prints is kept in the run's folder."""
    place = own_place(error) if own_lines(error) else ""
    if place and place not in _PRINTED:
        _PRINTED.add(place)
        with contextlib.suppress(Exception):  # an error whose own text cannot be made, or a closed stream
            print(whole(error), file=sys.stderr, end="", flush=True)
    return ["raised", message(error)]


def message(error: BaseException) -> str:
    """The error's text with the place where it was raised, cut to a length that can be sent."""
    origin = own_place(error)
    place = f"{origin}: " if origin else ""
    try:
        failure = failure_of(error)
        return f"{place}{failure}"[:MESSAGE] + hint(error) + _callers(failure.lines)
    except Exception:  # an error whose own text cannot be made
        return f"{place}{type(error).__name__}"


def _callers(lines: Sequence[str]) -> str:
    """The user's lines that led to the one that raised, the nearest first."""
    return f"; called by {', '.join(lines[1:])}" if lines[1:] else ""
