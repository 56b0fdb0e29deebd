"""Short calls to workers on the driver's machine, past Ray: a frame over a socket of the kernel's and its answer, in a fraction of the
time that an actor's call takes.

Ray carries all that is long or large, all that goes to another machine, and these too where a worker cannot be reached so.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from typing import Any

from ray import cloudpickle

from rlflow import own_lines

LINES = 2  # calls at once to one worker: as many as it has threads for what is short
LARGEST = 64 << 10  # bytes of a frame: what the kernel takes at once, also for a process that is stopped
ATTEMPTS = 100  # to connect, before a worker listens no more
GIVEN, PICKLED, RAISED = b"g", b"p", b"r"  # an answer that is bytes, any other, an exception


def listen(key: bytes, answer: Callable[[bytes], Any]) -> str:
    """On a worker: answer what comes over ``LINES`` lines from whoever has the key, each in a thread of its own. The name to connect to;
    none on systems whose sockets need files."""
    if sys.platform != "linux":
        return ""
    name = f"\0rlflow-{secrets.token_hex(16)}"
    listener = Listener(name, "AF_UNIX", backlog=LINES, authkey=key)
    threading.Thread(target=_accept, args=(listener, answer), name="lines", daemon=True).start()
    return name


def _accept(listener: Listener, answer: Callable[[bytes], Any]) -> None:
    """Connect all lines; whoever has not the key is turned away, but not for ever."""
    lines = 0
    with listener:
        for _ in range(ATTEMPTS):
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                connection = listener.accept()
                threading.Thread(target=_serve, args=(connection, answer), name=f"line {lines}", daemon=True).start()
                lines += 1
            if lines == LINES:
                return


def _serve(connection: Any, answer: Callable[[bytes], Any]) -> None:
    with connection, contextlib.suppress(EOFError, OSError):  # the other end is gone, or waits no longer
        while True:
            connection.send_bytes(_answered(connection.recv_bytes(), answer))


def _answered(told: bytes, answer: Callable[[bytes], Any]) -> bytes:
    try:
        given = answer(told)
        return GIVEN + given if isinstance(given, bytes) else PICKLED + _pickled(given)
    except Exception as error:
        return RAISED + _raised(error)


def _raised(error: Exception) -> bytes:
    """The exception, or, where it cannot be carried over, one that says the same."""
    try:
        raw = _pickled(error)
        cloudpickle.loads(raw)
    except Exception:
        other = own_lines.RaisedElsewhere(own_lines.described(error))
        own_lines.carry(error, other)
        return _pickled(other)
    return raw


def _pickled(value: Any) -> bytes:
    raw: bytes = cloudpickle.dumps(value)  # type: ignore[no-untyped-call]
    return raw


class Gone(Exception):
    """Who was spoken to hung up."""


class Lines:
    """The driver's ends of the lines to the workers of a pool, by rank; a line carries one call at a time. They come up while other things
    are done, and a worker that does not answer, or that is on another machine, has none."""

    def __init__(self, names: Sequence[str] = (), key: bytes = b"") -> None:
        self._free: list[deque[Connection]] = [deque() for _ in names]
        self._lock = threading.Lock()
        self._connecting = threading.Thread(target=self._connect, args=(names, key), name="lines", daemon=True)
        if names:
            self._connecting.start()

    def _connect(self, names: Sequence[str], key: bytes) -> None:
        for rank, name in enumerate(names):
            with contextlib.suppress(AuthenticationError, EOFError, OSError):
                for _ in range(LINES if name else 0):
                    self.give(rank, Client(name, "AF_UNIX", authkey=key))

    def settled(self, seconds: float) -> bool:
        """Whether all have come up that do, waited for as long as that."""
        if self._connecting.ident is not None:
            self._connecting.join(seconds)
        return not self._connecting.is_alive()

    def take(self, ranks: Iterable[int]) -> dict[int, Connection] | None:
        """A line to each of the ranks, or none to any."""
        wanted = tuple(ranks)
        with self._lock:
            if not all(rank < len(self._free) and self._free[rank] for rank in wanted):
                return None
            return {rank: self._free[rank].popleft() for rank in wanted}

    def give(self, rank: int, line: Connection) -> None:
        """A line is free again."""
        with self._lock:
            self._free[rank].append(line)

    def close(self) -> None:
        with self._lock:
            for lines in self._free:
                while lines:
                    lines.pop().close()


class PendingCalls:
    """Calls that were made over lines and what is heard of them. Made with the lines, which go back to where they are from."""

    def __init__(self, lines: Lines, taken: Mapping[int, Connection]) -> None:
        self._lines, self._open = lines, dict(taken)
        self.heard: dict[int, bytes] = {}
        self.broken: list[int] = []

    def say(self, rank: int, frame: bytes) -> None:
        try:
            self._open[rank].send_bytes(frame)
        except OSError:
            self._lost(rank)

    def listen(self, seconds: float) -> None:
        """Hear what comes until all have answered, one has raised or is gone, or the time is over."""
        limit = time.monotonic() + seconds
        while self._open and not self.broken and not any(map(raised, self.heard.values())):
            ready = wait(list(self._open.values()), max(limit - time.monotonic(), 0.0))
            for rank in [rank for rank, line in self._open.items() if line in ready]:
                self._hear(rank)
            if not ready:
                return

    def _hear(self, rank: int) -> None:
        try:
            self.heard[rank] = self._open[rank].recv_bytes()
        except (EOFError, OSError):
            self._lost(rank)
        else:
            self._lines.give(rank, self._open.pop(rank))

    def _lost(self, rank: int) -> None:
        self._open.pop(rank).close()
        self.broken.append(rank)

    def error(self, rank: int) -> BaseException | None:
        """What a rank raised, or that it is gone."""
        if rank in self.broken:
            return Gone("it hung up")
        heard = self.heard.get(rank, b"")
        return content(heard) if raised(heard) else None

    @property
    def waiting(self) -> list[int]:
        """Ranks that have not answered."""
        return list(self._open)

    def close(self) -> None:
        """Wait no longer: a line over which an answer may still come is of no use any more."""
        while self._open:
            self._open.popitem()[1].close()


def raised(heard: bytes) -> bool:
    return heard[:1] == RAISED


def content(heard: bytes) -> Any:
    """What was answered, or raised."""
    return heard[1:] if heard[:1] == GIVEN else cloudpickle.loads(heard[1:])
