"""Short calls to workers on the driver's machine: a frame and its answer over a Unix socket, without Ray.

A short call takes a fraction of the time of a Ray actor call. Ray is still used for calls that are long or
large or go to other machines, and for workers that have no free connection.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from rlflow.cluster.rpc.rank_transport import Gone
from rlflow.cluster.rpc.replies import content, raised, reply

CONNECTIONS = 2  # connections to each worker, as many as it has threads for short calls
# maximum size of a frame in bytes: the kernel accepts this many at once, even if the receiving process is
# stopped
LARGEST = 64 << 10
ATTEMPTS = 100  # attempts to connect before a worker stops listening


def listen(key: bytes, answer: Callable[[bytes], Any]) -> str:
    """Answer frames from processes that have the key, in threads of this worker. Return the socket's name.

    ``answer``: a function from a frame to its answer. Each of the ``CONNECTIONS`` connections has a thread of
    its own. The name is empty on systems whose Unix sockets need files.
    """
    if sys.platform != "linux":
        return ""
    name = f"\0rlflow-{secrets.token_hex(16)}"
    listener = Listener(name, "AF_UNIX", backlog=CONNECTIONS, authkey=key)
    threading.Thread(target=_accept, args=(listener, answer), name="lines", daemon=True).start()
    return name


def _accept(listener: Listener, answer: Callable[[bytes], Any]) -> None:
    """Accept up to CONNECTIONS connections. Refuse processes without the key, at most ATTEMPTS times."""
    connected = 0
    with listener:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                threading.Thread(
                    target=_serve, args=(connection, answer), name=f"line {connected}", daemon=True
                ).start()
                connected += 1
            if connected == CONNECTIONS:
                return


def _serve(connection: Any, answer: Callable[[bytes], Any]) -> None:
    with connection, contextlib.suppress(EOFError, OSError):  # the other end has closed the connection
        while True:
            frame = connection.recv_bytes()
            connection.send_bytes(reply(partial(answer, frame)))


class Sockets:
    """The driver's connections to the workers of a pool, by rank.

    They are opened in a separate thread, and each carries one call at a time. Workers on other machines, and
    workers that don't answer, have no connection. ``names``: the socket name that ``listen`` returned on each
    rank. ``key``: the secret passed to ``listen``.
    """

    def __init__(self, names: Sequence[str] = (), key: bytes = b"") -> None:
        self._free: list[deque[Connection]] = [deque() for _ in names]
        self._lock = threading.Lock()
        self._connecting = threading.Thread(
            target=self._connect, args=(names, key), name="lines", daemon=True
        )
        if names:
            self._connecting.start()

    def _connect(self, names: Sequence[str], key: bytes) -> None:
        for rank, name in enumerate(names):
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                for _ in range(CONNECTIONS if name else 0):
                    self.give(rank, Client(name, "AF_UNIX", authkey=key))

    def settled(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for each connection to open or fail. Return whether that has happened."""
        if self._connecting.ident is not None:
            self._connecting.join(seconds)
        return not self._connecting.is_alive()

    def take(self, ranks: Iterable[int]) -> dict[int, Connection] | None:
        """Take a free connection to each of the ranks, and return the connections by rank.

        If one of the ranks has no free connection, takes nothing and returns None.
        """
        needed = tuple(ranks)
        with self._lock:
            if not all(rank < len(self._free) and self._free[rank] for rank in needed):
                return None
            return {rank: self._free[rank].popleft() for rank in needed}

    def give(self, rank: int, connection: Connection) -> None:
        """Mark a connection as free again."""
        with self._lock:
            self._free[rank].append(connection)

    def close(self) -> None:
        """Close all connections that are free."""
        with self._lock:
            for connections in self._free:
                while connections:
                    connections.pop().close()


class PendingCalls:
    """Calls in progress, one per connection, and their replies.

    Once its reply has arrived, a connection is free again in ``sockets``.
    """

    def __init__(self, sockets: Sockets, connections: Mapping[int, Connection]) -> None:
        self._sockets, self._open = sockets, dict(connections)
        self.replies: dict[int, bytes] = {}  # rank → reply
        self.broken: list[int] = []  # ranks whose connection is lost

    def send(self, rank: int, frame: bytes) -> None:
        """Send a frame to a rank over its connection."""
        try:
            self._open[rank].send_bytes(frame)
        except OSError:
            self._lost(rank)

    def listen(self, seconds: float) -> None:
        """Receive replies until all have arrived.

        Returns earlier if a reply is an exception, if a connection is lost, or after ``seconds``.
        """
        limit = time.monotonic() + seconds
        while self._open and not self.broken and not any(map(raised, self.replies.values())):
            ready = wait(list(self._open.values()), max(limit - time.monotonic(), 0.0))
            for rank in [rank for rank, connection in self._open.items() if connection in ready]:
                self._receive(rank)
            if not ready:
                return

    def _receive(self, rank: int) -> None:
        try:
            self.replies[rank] = self._open[rank].recv_bytes()
        except (EOFError, OSError):
            self._lost(rank)
        else:
            self._sockets.give(rank, self._open.pop(rank))

    def _lost(self, rank: int) -> None:
        self._open.pop(rank).close()
        self.broken.append(rank)

    def error(self, rank: int) -> BaseException | None:
        """Return the exception that a rank raised, Gone if its connection is lost, or None."""
        if rank in self.broken:
            return Gone("the worker closed the connection")
        answer = self.replies.get(rank, b"")
        return content(answer) if raised(answer) else None

    @property
    def waiting(self) -> list[int]:
        """The ranks that haven't answered yet."""
        return list(self._open)

    def close(self) -> None:
        """Stop waiting, and close the connections on which a reply could still arrive."""
        while self._open:
            self._open.popitem()[1].close()
