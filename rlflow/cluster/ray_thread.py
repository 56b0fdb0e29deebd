"""Calls to Ray that may hang, made in a separate thread.

Ray's native code can wait minutes for a controlling process that doesn't answer, and blocks signals
meanwhile. With a separate thread, the caller has a deadline and still reacts to signals. A call that connects
to Ray may also hold the interpreter's lock all that time, so the watchdog process enforces the same deadline.
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
    """Ray didn't answer before the deadline."""


class RayThread:
    """The thread that makes all calls to one Ray cluster.

    It must live as long as the connection, because the kernel ends a Ray cluster when the thread that started
    it ends.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ray", daemon=True)
        self._thread.start()
        self.stuck = False  # whether the current call has timed out

    def do(self, call: Callable[[], T], seconds: float) -> T:
        """Make a call in this thread, and return its result or raise its error.

        Raises RayLate if the call doesn't return within ``seconds``, and so does every call after that.
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
        """Stop waiting for the call, even when this process exits.

        Ray's exit handler is removed, because it would wait for the call.
        """
        self.stuck = True
        atexit.unregister(ray.shutdown)
        launcher.leave_at_once()
        self.end()

    def end(self) -> None:
        """End the thread once it has made the calls that are already queued."""
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

    Raises the call's error, or RayLate if it doesn't return within ``seconds``. If the call still holds the
    interpreter's lock by then, the watchdog prints ``late`` and ends this process with exit code 2.
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
    """Make a call to Ray, and return its result.

    Raises the call's error, or RayLate if Ray doesn't answer within ``seconds``.
    """
    # the connection was not made by ``connect``
    return _threads[-1].do(call, seconds) if _threads else call()


def disconnect() -> None:
    """Disconnect from the Ray cluster that ``connect`` joined or started. A cluster started here ends."""
    if _threads:
        with contextlib.suppress(RayLate):
            asked(ray.shutdown)
        _threads.pop().end()
