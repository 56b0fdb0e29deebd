"""Encode messages between a pool and its worker processes.

A frame is the length in four bytes, then the message as msgpack. Pickle is never used.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack

LIMIT = 1 << 20  # most bytes of a reply, so that user code cannot fill the pool's memory
WHOLE = -1  # the place in a reply that concerns the complete request instead of a row
_LENGTH = struct.Struct("<I")


def packed(message: Any) -> bytes:
    """Encode a message of plain values as a frame. Lone surrogates in text are preserved."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> Any:
    """Decode the body of a frame. Raises ValueError if the body is not msgpack."""
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")


def reply(number: int, place: int, body: Any) -> list[Any]:
    """Encode a reply as a frame.

    ``number``: the number of its request. ``place``: the index of its row in the request, or ``WHOLE`` for a
    reply to the complete request. ``body``: the content.
    """
    return [number, place, body]


class FrameReader:
    """Splits a stream of bytes into the bodies of its frames.

    ``limit``: maximum number of bytes in a body.
    """

    def __init__(self, limit: int) -> None:
        self.limit, self._buffer, self._start = limit, bytearray(), 0

    def feed(self, data: bytes) -> None:
        """Append bytes to the stream."""
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """Return the body of the next frame; None if more bytes are needed.

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
