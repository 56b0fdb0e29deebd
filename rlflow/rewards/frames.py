"""Messages between a pool and its worker processes: four bytes of length, then msgpack. Nothing here is ever
a pickle."""

from __future__ import annotations

import struct
from typing import Any

import msgpack

LIMIT = 1 << 20  # bytes of a reply; user code cannot make the pool hold more
WHOLE = -1  # the place of a reply to a request as a whole
_LENGTH = struct.Struct("<I")


def packed(message: Any) -> bytes:
    """The message of plain values as a frame: length and msgpack. Lone surrogates in text survive."""
    body: bytes = msgpack.packb(message, unicode_errors="surrogatepass")
    return _LENGTH.pack(len(body)) + body


def unpacked(body: bytes) -> Any:
    """The message of a frame's body. Raises ValueError for bytes that are no msgpack."""
    return msgpack.unpackb(body, strict_map_key=False, unicode_errors="surrogatepass")


def reply(number: int, place: int, body: Any) -> list[Any]:
    """A reply with the number of its request, and the place of its row within the request, or ``WHOLE``."""
    return [number, place, body]


class FrameReader:
    """Cuts a stream of bytes into message bodies. ``limit``: the most bytes of a body."""

    def __init__(self, limit: int) -> None:
        self.limit, self._buffer, self._start = limit, bytearray(), 0

    def feed(self, data: bytes) -> None:
        """Add bytes to the end of the stream."""
        del self._buffer[: self._start]
        self._start = 0
        self._buffer += data

    def next(self) -> bytes | None:
        """The body of the next message, or None where more bytes are needed. Raises ValueError for one that
        is longer than the limit."""
        opens = self._start + _LENGTH.size
        if len(self._buffer) < opens:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        if length > self.limit:
            raise ValueError(f"a message of {length} bytes, more than {self.limit}")
        if len(self._buffer) < opens + length:
            return None
        self._start = opens + length
        return bytes(self._buffer[opens : self._start])
