"""Check that there's a Ray cluster at an address, before Ray's own code connects this process to it.

If there's a different server at the address, Ray's code waits for minutes. If a process of the cluster hangs,
Ray's code can hold the interpreter's lock, and in the end kills the process that wanted to join. That's why a
child process joins first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from rlflow.errors import printable
from rlflow.processes.children import Child

# HTTP/2, which Ray uses, starts with these bytes; the settings are empty
GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
# size of a frame header, whose fourth byte is the frame type; type of the first frame of an HTTP/2 server
HEAD, SETTINGS = 9, 4
EVERY = 2.0  # seconds between two checks of a joined controller
# seconds without a connection after which the controller counts as lost; Ray's own code ends this process
# after 60 seconds
GONE = 30.0
SHOWN = 60  # maximum number of characters shown of another server's answer
LOGGED = 300  # maximum number of characters shown of Ray's last line before it ended a process
# The program of the child that joins a Ray cluster. It prints Ray's error, if any.
JOIN = """
import os, sys, ray
try:
    ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False)
except Exception as error:
    print(error, flush=True)
os._exit(0)
"""


def check_speaks(address: str, seconds: float) -> str:
    """Check that the server at ``address`` could be Ray's controller, and return its HOST:PORT.

    Returns an empty string if the address has no host and port. Raises OSError if nothing answers within
    ``seconds``, or if the server isn't Ray.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return ""
    with socket.create_connection((host.strip("[]"), int(port)), seconds) as connection:
        if os.environ.get("RAY_USE_TLS", "0") in ("", "0"):  # with TLS the server would not answer plain text
            connection.settimeout(seconds)
            check_greeting(_answer(connection), seconds)
    return address


def _answer(connection: socket.socket) -> bytes | None:
    """Return the first bytes received on the connection, or None if none arrive in time."""
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
    """Raise OSError unless ``answer``, the server's answer to GREETING, is HTTP/2.

    None means that there was no answer within ``seconds``.
    """
    if answer is None:
        raise OSError(f"the server accepts connections but sent nothing for {seconds:g} s")
    if not answer:
        raise OSError("the server closed the connection at once, so it is not a Ray")
    if len(answer) < HEAD or answer[3] != SETTINGS:
        words = answer.decode("ascii", "replace").splitlines()[0]
        raise OSError(f"the server answered, but it is not a Ray: {words!r}")


def check_joins(address: str, seconds: float, program: str = JOIN) -> None:
    """Check that a process can join the Ray cluster at an address, by letting a child process join and exit.

    ``program``: the Python program that the child runs. Raises TimeoutError if the child hasn't joined within
    ``seconds``, and OSError if it can't join.
    """
    command, pipe = [sys.executable, "-P", "-c", program, address], subprocess.PIPE
    with Child(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as child:
        try:
            printed, logged = child.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"a process did not join the Ray within {seconds:g} s") from None
        finally:
            child.end()
    if child.returncode:
        raise OSError(f"Ray ended the process that joined it{_last_line(logged)}")
    if printed:
        raise OSError(f"{printed.decode(errors='replace').splitlines()[0]}{_last_line(logged)}")


def _last_line(logged: bytes) -> str:
    """Return the last line of Ray's log, without its time and process id, to be appended to a sentence."""
    lines = printable(logged.decode(errors="replace")).strip().splitlines()
    return f": {lines[-1].rpartition('] ')[2][:LOGGED]}" if lines else ""


class Listening:
    """Checks whether the controller (GCS) of a joined Ray cluster accepts connections.

    Call ``lost`` often; it only tries to connect every few seconds. ``address``: HOST:PORT. ``clock``: a
    function that returns the time in seconds.
    """

    def __init__(self, address: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._address, self._clock = address, clock
        self._looked, self._taken = clock(), clock()

    def lost(self) -> str | None:
        """Return a message if the controller has accepted no connection for GONE seconds, otherwise None."""
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
            f"Ray's controller (GCS) at {self._address} accepted no connection for {now - self._taken:.0f} s"
        )


def check_local() -> None:
    """Raise OSError if processes on this machine can't connect to each other at 127.0.0.1."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            socket.create_connection(listener.getsockname(), 5.0).close()
    except OSError as error:
        raise OSError(
            f"127.0.0.1 cannot be reached on this machine ({error.strerror or error}): enable the loopback "
            "interface with `ip link set lo up`"
        ) from error
