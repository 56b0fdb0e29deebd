"""Convert a reward function's return value to the message about its row, and collect the scores of a request.

The message is a number; a number with further numbers and an answer; or the cause of a missing score.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlflow.processes.user_frames import failure_of, own_lines, own_place, whole
from rlflow.rewards.hints import hint

STEP = 0.05  # seconds between two checks of a waiting call; shorter waits do not count
NAN = float("nan")
MESSAGE = 2000  # most characters of an error in a message
SCORE = "score"  # the key of the score in a returned dictionary
# The key of the answer extracted from the response in a returned dictionary, as in verl.
ANSWER = "pred"
LONGEST = 1000  # most characters of an answer in a message
OTHERS = 32  # most further numbers that are logged for a row
NOT_HELD = "too large for float32: scale it down"
RETURNED = "the function returned"
LARGEST = 3.4028234663852886e38  # the largest float32; scores are stored as float32
# Causes that concern the returned value. Their messages contain no line of the function, since no line
# raised.
OF_VALUES = ("none", "nan", "type", "overflow")
_PRINTED: set[str] = set()  # the lines of users' files whose tracebacks this process has printed
KEY = re.compile(r"[\w.@/-]{1,64}")  # valid keys of further numbers; entries with other keys are skipped


@dataclass
class Results:
    """The scores of a request's rows.

    Causes of missing scores: none (the function returned None), nan (not finite), overflow (finite, but too
    large for float32), type (not a number), raised, timeout, died.
    """

    values: list[float]  # one score for each row, in order; NaN if it is missing
    missing: Counter[str] = field(default_factory=Counter)  # cause → number of missing scores
    first: dict[str, str] = field(default_factory=dict)  # cause → message of the first missing score
    # Key → a further number of each row; NaN if a row has none.
    others: dict[str, list[float]] = field(default_factory=dict)
    # Row → the answer that the scorer extracted from the response, if it returned one.
    answers: dict[int, str] = field(default_factory=dict)


def verdict(value: Any, source: str = RETURNED) -> Any:
    """Convert the value that a reward returned for a row.

    Returns a finite float, or [cause, message] if there is no score. If the value is a dictionary with more
    than a score, returns {"score": float, "others": {key: float}, "answer": text}, of which "others" and
    "answer" are optional. ``source``: see ``number``.
    """
    if not isinstance(value, Mapping):
        return number(value, source)
    if SCORE not in value:
        return ["type", f"the function returned {type(value).__name__} without '{SCORE}'{_instead(value)}"]
    score = number(value[SCORE], source)
    others, answer = dict(_others(value)), _answer(value.get(ANSWER))
    beside = ({"others": others} if others else {}) | ({"answer": answer} if answer is not None else {})
    return {"score": score, **beside} if isinstance(score, float) and beside else score


def _answer(value: Any) -> str | None:
    """Return an extracted answer as text, so that votes can be counted; None for an empty text or another
    type."""
    return str(value)[:LONGEST] or None if isinstance(value, str | numbers.Real) else None


def _others(value: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    """Yield (key, value) for the finite numbers in a dictionary except its score, at most OTHERS of them."""
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
    """Return the value as a finite float, or [cause, message] if it cannot be one.

    ``source``: the beginning of the message, which says where the value comes from.
    """
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
    except OverflowError:  # from a large int
        return ["overflow", f"{source} a number beyond 1e308, {NOT_HELD}"]
    if not math.isfinite(score):
        return ["nan", f"{source} {score}"]
    return score if abs(score) <= LARGEST else ["overflow", f"{source} {score:g}, {NOT_HELD}"]


def _instead(value: Any) -> str:
    """Return advice to append to the message about a dictionary, list or coroutine; empty for other
    values."""
    if isinstance(value, Mapping):
        keys = [repr(name) for name, score in value.items() if isinstance(score, numbers.Real)]
        return f": use the key '{SCORE}' for the score instead of {keys[0]}" if keys else ""
    if isinstance(value, list | tuple):
        return ": it is called for one row, and must return one number"
    return ": define the function with async def" if inspect.iscoroutine(value) else ""


def raised(error: BaseException) -> list[str]:
    """Return [cause, message] for a row whose function raised. The message is the error's text with its
    place, shortened.

    For each line of the user's file that raises, the full traceback is printed once. The run folder keeps
    everything that rewards print.
    """
    place = own_place(error) if own_lines(error) else ""
    if place and place not in _PRINTED:
        _PRINTED.add(place)
        with contextlib.suppress(Exception):  # the error's text may raise, or the stream may be closed
            print(whole(error), file=sys.stderr, end="", flush=True)
    return ["raised", message(error)]


def message(error: BaseException) -> str:
    """Return the error's text with the place where it was raised, shortened to MESSAGE characters."""
    origin = own_place(error)
    place = f"{origin}: " if origin else ""
    try:
        failure = failure_of(error)
        return f"{place}{failure}"[:MESSAGE] + hint(error) + _callers(failure.lines)
    except Exception:  # the error's text may raise
        return f"{place}{type(error).__name__}"


def _callers(lines: Sequence[str]) -> str:
    """Return the lines of the user's files that led to the raising line, the nearest caller first."""
    return f"; called by {', '.join(lines[1:])}" if lines[1:] else ""
