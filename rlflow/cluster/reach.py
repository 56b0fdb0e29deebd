"""What answers at the address of a Ray, looked at before Ray's own code does: that waits for minutes where
something else is there."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable

# HTTP/2 begins so, and with it Ray: no settings
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# bytes before a frame, of which the fourth is its kind; the kind with which a server of HTTP/2 begins
HEAD, SETTINGS = 9, 4
EVERY = 2.0  # seconds between two looks at a controller that was joined
# seconds without a connection after which it counts as lost; Ray's own code ends this process after 60
GONE = 30.0
SHOWN = 60  # most letters of another answer


def check_speaks(address: str, seconds: float) -> str:
    """Look at what answers at a Ray's address within so many seconds. Gives HOST:PORT of what may be Ray's
    controller; empty where the address does not say it. Raises OSError where nothing answers there, or
    something that is no Ray."""
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return ""
    with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):  # else it answers to nothing but TLS
            connection.settimeout(seconds)
            check_greeting(_answer(connection), seconds)
    return address


def _answer(connection: socket.socket) -> bytes | None:
    """The first bytes that come; None where none come in time."""
    answer = b""
    try:
        connection.sendall(GREETING)
        while len(answer) < HEAD and (piece := connection.recv(SHOWN)):
            answer += piece
    except TimeoutError:
        return answer or None
    except ConnectionError:
        return answer
    return answer


def check_greeting(answer: bytes | None, seconds: float) -> None:
    """Raises OSError where the answer to GREETING is none of HTTP/2."""
    if answer is None:
        raise OSError(f"it takes the connection, and says nothing for {seconds:g} s")
    if not answer:
        raise OSError("it ends the connection at once, which is not what a Ray does")
    if len(answer) < HEAD or answer[3] != SETTINGS:
        words = answer.decode("ascii", "replace").splitlines()[0]
        raise OSError(f"it answers, but not as a Ray: {words!r}")


class Listening:
    """Watches whether the controller (GCS) of a Ray that was joined takes connections. Ask often: it is
    looked at every few seconds.
    ``address``: HOST:PORT. ``clock``: gives seconds."""

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self._looked, self._taken = clock(), clock()

    def lost(self) -> str | None:
        """A text that says for how long it has taken no connection, once that is GONE seconds; else None."""
        now = self._clock()
        if now - self._looked >= EVERY:
            self._looked = now
            with contextlib.suppress(OSError):
                host, _, port = self._address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), EVERY).close()
                self._taken = now
        if now - self._taken < GONE:
            return None
        return (
            f"Ray's controller (GCS) at {self._address} has taken no connection for {now - self._taken:.0f} s"
        )


def check_local() -> None:
    """Raises OSError where processes of this machine cannot reach each other at 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), 5.0).close()
    except OSError as error:
        raise OSError(
            f"nothing reaches 127.0.0.1 on this machine ({error.strerror or error}): `ip link set lo up` "
            "brings it up"
        ) from error
