"""Replies: the answer or the exception of a call, as bytes. Caller and rank share no objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cloudpickle

from rlflow.processes.user_frames import portable

# first byte of a reply: the answer is bytes, the answer is any other value, or the call raised an exception
BYTES, PICKLED, RAISED = b"g", b"p", b"r"


def reply(call: Callable[[], Any]) -> bytes:
    """Run a call; return its reply with the answer or the exception."""
    try:
        return of_answer(call())
    except Exception as error:
        return of_error(error)


def of_answer(answer: Any) -> bytes:
    """Return the reply with an answer."""
    return BYTES + answer if isinstance(answer, bytes) else PICKLED + pickled(answer)


def of_error(error: Exception) -> bytes:
    """Return the reply with an exception.

    An exception that cannot be pickled is replaced with a description.
    """
    return RAISED + pickled(portable(error))


def raised(reply: bytes) -> bool:
    """Whether a reply is an exception."""
    return reply[:1] == RAISED


def content(reply: bytes) -> Any:
    """Return the answer or the exception of a reply."""
    return reply[1:] if reply[:1] == BYTES else cloudpickle.loads(reply[1:])


def pickled(value: Any) -> bytes:
    """Return a value as bytes."""
    raw: bytes = cloudpickle.dumps(value)
    return raw
