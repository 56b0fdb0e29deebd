"""Replies: a call's answer or exception, as bytes, so that the caller and the rank share no objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from rlflow.processes.user_frames import portable

# first byte of a reply: the answer is bytes, the answer is any other value, or the call raised an exception
BYTES, PICKLED, RAISED = b"g", b"p", b"r"


def reply(call: Callable[[], Any]) -> bytes:
    """Run a call, and return its answer or its exception as a reply."""
    try:
        return of_answer(call())
    except Exception as error:
        return of_error(error)


def of_answer(answer: Any) -> bytes:
    """Return an answer as a reply."""
    return BYTES + answer if isinstance(answer, bytes) else PICKLED + pickled(answer)


def of_error(error: Exception) -> bytes:
    """Return an exception as a reply.

    If the exception can't be pickled, the reply contains a description of it instead.
    """
    return RAISED + pickled(portable(error))


def raised(reply: bytes) -> bool:
    """Return whether a reply contains an exception."""
    return reply[:1] == RAISED


def content(reply: bytes) -> Any:
    """Return the answer or the exception in a reply."""
    return reply[1:] if reply[:1] == BYTES else cloudpickle.loads(reply[1:])


def pickled(value: Any) -> bytes:
    """Return a value as a pickle."""
    raw: bytes = cloudpickle.dumps(value)
    return raw
