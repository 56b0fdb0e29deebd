"""Requests to a fork server over its socket.

This module imports only the standard library, because the client must start fast.
"""

from __future__ import annotations

import json
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

LENGTH, REPLY = struct.Struct("!I"), struct.Struct("!i")
FILES = 3  # stdin, stdout and stderr of the client
LONGEST = 1 << 24  # maximum size of a request in bytes


@dataclass(frozen=True)
class Request:
    """A request to the fork server to import modules and, optionally, start a process."""

    key: str  # secret of the server
    modules: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)  # path of a Python script, and its arguments
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"  # working directory


def send(connection: socket.socket, request: Request, files: list[int]) -> None:
    """Send a request, with the file descriptors for the new process's stdin, stdout and stderr.

    Raises OSError.
    """
    text = json.dumps(asdict(request)).encode()
    message = LENGTH.pack(len(text)) + text
    sent = socket.send_fds(connection, [message], files) if files else connection.send(message)
    if rest := message[sent:]:  # the server may have answered and closed by now
        connection.sendall(rest)


def receive(connection: socket.socket) -> tuple[Request, list[int]]:
    """Return the next request from a connection, and its file descriptors.

    Raises ValueError if the data isn't a request, EOFError if the connection is closed, or OSError.
    """
    message, files, _, _ = socket.recv_fds(connection, LENGTH.size, FILES)
    length = LENGTH.unpack(message + _exactly(connection, LENGTH.size - len(message)))[0]
    if length > LONGEST:
        raise ValueError(f"a request of {length} bytes")
    values: Any = json.loads(_exactly(connection, length))
    try:
        return Request(**values), list(files)
    except TypeError as error:
        raise ValueError(str(error)) from error


def reply(connection: socket.socket) -> int:
    """Return the next number that the server sends.

    The server first sends the new process's pid, and later its ``os.waitpid`` status. Raises EOFError if the
    connection is closed, or OSError.
    """
    return int(REPLY.unpack(_exactly(connection, REPLY.size))[0])


def _exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, 1 << 16))
        if not part:
            raise EOFError("the connection was closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
