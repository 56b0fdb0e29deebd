"""Encodes messages between a pool and its worker processes.

A message consists of plain values and records of errors. Pickle is never used.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import astuple, replace
from typing import Any

import msgpack

from rlflow.errors import RemoteFailure

LIMIT = 1 << 20  # maximum size of a reply in bytes, so that user code cannot fill the pool's memory
WHOLE = -1  # the place in a reply to the whole request rather than to one row
# Bounds of a record, so that its message stays within LIMIT.
TEXT = 1 << 14  # maximum number of characters in each text
NOTES = 8  # maximum number of notes; the last ones are sent
_FAILURE = 1  # msgpack's code for a record
_LENGTH = struct.Struct("<I")


def packed(message: Any) -> bytes:
    """Encode a message as a frame. Lone surrogates in text are preserved."""
    body = _encoded(message)
    return _LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> Any:
    """Decode the message in a frame's body. Raises ValueError if the body isn't a message."""
    return _decoded(body, _record)


def _encoded(value: Any) -> bytes:
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass", default=_extension)
    return body


def _decoded(body: bytes, extension: Callable[[int, bytes], Any]) -> Any:
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=extension)


def _extension(value: object) -> msgpack.ExtType:
    """Return a record for msgpack, with its strings cut to the length limits."""
    if not isinstance(value, RemoteFailure):
        raise TypeError(f"a message contains {type(value).__name__}")
    parts = astuple(replace(value, notes=value.notes[-NOTES:]))
    cut = [part[:TEXT] if isinstance(part, str) else [text[:TEXT] for text in part] for part in parts]
    return msgpack.ExtType(_FAILURE, _encoded(cut))


def _record(code: int, body: bytes) -> RemoteFailure:
    # A record has no other records: a nested one is left as msgpack's own type, and matches nothing.
    match _decoded(body, msgpack.ExtType):
        case [str(kind), str(text), [*lines], [*notes], str(place), str(hint)] if code == _FAILURE and all(
            isinstance(each, str) for each in (*lines, *notes)
        ):
            return RemoteFailure(kind, text, tuple(lines), tuple(notes), place, hint)
    raise ValueError("a message contains an invalid record of an error")


def reply(number: int, place: int, body: Any) -> list[Any]:
    """Encode a reply as a frame.

    ``number``: the number of the request. ``place``: the index of the row in the request, or ``WHOLE`` for a
    reply to the whole request. ``body``: the content.
    """
    return [number, place, body]


class FrameReader:
    """Splits a stream of bytes into the bodies of its frames.

    ``limit``: the largest body allowed, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._buffer, self._start = limit, bytearray(), 0

    def feed(self, data: bytes) -> None:
        """Append bytes to the stream."""
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the body of the next frame, or None if more bytes are needed.

        Raises ValueError if the body is longer than the limit.
        """
        opens = self._start + _LENGTH.size
        if len(self._buffer) < opens:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self.limit:
            raise ValueError(f"a message has {length} bytes, more than {self.limit}")
        if len(self._buffer) < opens + length:
            return None
        self._start = opens + length
        return bytes(self._buffer[opens : self._start])
