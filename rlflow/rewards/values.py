"""Converts what a reward function returns to the message about its row, and collects a request's scores.

The message is a score, a score with further numbers and an answer, or the cause of a missing score.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import numbers
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.errors import Reason, RemoteFailure
from rlflow.processes.user_frames import failure_of, whole
from rlflow.rewards.hints import hint

STEP = 0.05  # seconds between two checks of a waiting call; shorter waits do not count
NAN = float("nan")
SCORE = "score"  # the key of the score in a returned dictionary
# The key of the answer extracted from the response in a returned dictionary, as in verl.
ANSWER = "pred"
LONGEST = 1000  # maximum number of characters of an answer shown in a message
OTHERS = 32  # maximum number of further numbers logged for a row
NOT_HELD = "too large for float32: scale it down"
RETURNED = "the function returned"
LARGEST = 3.4028234663852886e38  # the largest float32; scores are stored as float32
NONE = "none"  # the cause if a function returned None
# Causes that concern the returned value. Their messages contain no line of the function, since no line
# raised.
OF_VALUES = (NONE, "nan", "type", "overflow")
_PRINTED: set[str] = set()  # the lines of users' files whose tracebacks this process has printed
KEY = re.compile(r"[\w.@/-]{1,64}")  # valid keys of further numbers; entries with other keys are skipped


@dataclass
class Results:
    """The scores of a request's rows, with the causes of missing scores.

    Causes: none (the function returned None), nan (not finite), overflow (finite, but too large for float32),
    type (not a number), raised, timeout, died.
    """

    values: list[float]  # one score for each row, in order; NaN if it is missing
    missing: Counter[str] = field(default_factory=Counter)  # cause → number of missing scores
    first: dict[str, Reason] = field(default_factory=dict)  # cause → reason of the first missing score
    # Key → a further number of each row; NaN if a row has none.
    others: dict[str, list[float]] = field(default_factory=dict)
    none: set[int] = field(default_factory=set)  # rows for which the function returned None
    # Row → the answer that the scorer extracted from the response, if it returned one.
    answers: dict[int, str] = field(default_factory=dict)


def verdict(value: Any, source: str = RETURNED) -> Any:
    """Convert what a reward function returned for one row.

    Returns the score as a finite float, or [cause, message] if there is none. A dictionary with more than a
    score becomes {"score": float, "others": {key: float}, "answer": text}, where "others" and "answer" are
    optional. ``source``: how the message begins, such as "the function returned".
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
    """Return an extracted answer as text, for majority votes. None if it's empty, or not text or a number."""
    return str(value)[:LONGEST] or None if isinstance(value, str | numbers.Real) else None


def _others(value: Mapping[Any, Any]) -> Iterator[tuple[str, float]]:
    """Yield (key, value) for up to OTHERS finite numbers in a reward's dictionary, except the score."""
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
    """Return the value as a finite float, or [cause, message] if it can't be one.

    ``source``: how the message begins, which says who returned the value.
    """
    if value is None:
        return [NONE, f"{source} None"]
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
    """Return advice to add to the error about a dictionary, list or coroutine; empty for other values."""
    if isinstance(value, Mapping):
        keys = [repr(name) for name, score in value.items() if isinstance(score, numbers.Real)]
        return f": use the key '{SCORE}' for the score instead of {keys[0]}" if keys else ""
    if isinstance(value, list | tuple):
        return ": it is called for one row, and must return one number"
    return ": define the function with async def" if inspect.iscoroutine(value) else ""


def failure(error: BaseException) -> RemoteFailure:
    """Return the record of an error, with a hint if the sandbox caused it."""
    return failure_of(error, hint(error))


def raised(error: BaseException) -> list[Any]:
    """Return [cause, record] for a row whose function raised an exception.

    The message is the error's text and place, shortened. The full traceback is printed once for each line
    that raises, and what rewards print is kept in the run folder.
    """
    record = failure(error)
    if record.lines and record.place not in _PRINTED:
        _PRINTED.add(record.place)
        with contextlib.suppress(Exception):  # the stream may be closed
            print(whole(error), file=sys.stderr, end="", flush=True)
    return ["raised", record]


def missing(reply: Any, causes: Collection[str]) -> tuple[str, Reason] | None:
    """Return (cause, reason) if a worker's reply is such a pair with one of ``causes``, else None."""
    match reply:
        case [str(cause), str() | RemoteFailure() as reason] if cause in causes:
            return cause, reason
    return None
