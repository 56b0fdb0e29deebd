"""Calls to Ray that may hang, made in a separate thread.

Ray's native code can wait for minutes for a controlling process that does not answer, and blocks signals
during that time. With a separate thread, the caller has a deadline and still reacts to signals. A call that
connects to Ray may also hold the interpreter's lock during this time. The watchdog process therefore enforces
the same deadline.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import ray

from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.beside import during_call
from rlflow.processes.watchdog.signals import own_terminations

SECONDS = 30.0  # time limit for Ray to answer a call
T = TypeVar("T")
Call = tuple["Future[Any]", Callable[[], Any]]


class RayLate(RuntimeError):
    """Ray did not answer before the deadline."""


class RayThread:
    """The thread that makes all calls to one Ray cluster.

    It must live as long as the connection: the kernel ends a Ray cluster when the thread that started it
    ends.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ray", daemon=True)
        self._thread.start()
        self.stuck = False  # whether the current call has timed out

    def do(self, call: Callable[[], T], seconds: float) -> T:
        """Make a call in this thread, and return its result or raise its error.

        Raises RayLate if the call does not return within ``seconds``. After that, every later call raises
        RayLate too.
        """
        future: Future[T] = Future()
        if not self.stuck:
            self._calls.put((future, call))
            try:
                wait([future], seconds)
            finally:
                if not future.done():
                    self._give_up()
        if self.stuck:
            raise RayLate(f"Ray did not answer within {seconds:g} s")
        return future.result()

    def _give_up(self) -> None:
        """Stop waiting for the call, also when this process exits.

        Ray's exit handler would wait for the call, so it is removed.
        """
        self.stuck = True
        atexit.unregister(ray.shutdown)
        launcher.leave_at_once()
        self.end()

    def end(self) -> None:
        """End the thread after the calls that are already queued."""
        self._calls.put(None)

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, call = asked
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        if self.stuck:  # nobody uses a connection that was made too late
            with contextlib.suppress(Exception):
                ray.shutdown()


_threads: list[RayThread] = []  # thread of this process's connection, if any


def connect(call: Callable[[], T], seconds: float, late: str) -> T:
    """Make a call that connects this process to a Ray cluster, and return its result.

    Raises the call's error, or RayLate if it does not return within ``seconds``. If the call still holds the
    interpreter's lock at its deadline, the watchdog prints ``late`` and ends this process with exit code 2.
    """
    disconnect()
    _threads.append(RayThread())
    try:
        with own_terminations(), during_call("Ray", seconds, late):
            return asked(call, seconds)
    except BaseException:
        disconnect()
        raise


def asked(call: Callable[[], T], seconds: float = SECONDS) -> T:
    """Make a call to Ray and return its result.

    Raises the call's error, or RayLate if Ray does not answer within ``seconds``.
    """
    # the connection was not made by ``connect``
    return _threads[-1].do(call, seconds) if _threads else call()


def disconnect() -> None:
    """Disconnect from the Ray cluster that ``connect`` has joined or started. A Ray cluster that was started
    here ends."""
    if _threads:
        with contextlib.suppress(RayLate):
            asked(ray.shutdown)
        _threads.pop().end()
