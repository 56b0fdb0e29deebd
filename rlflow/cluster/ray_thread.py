"""Calls of Ray that may not return: Ray's native code waits for minutes for a controller that does not
answer, and signals wait with it. They are made in a thread, so that whoever waits for one has a deadline and
obeys signals."""

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
from rlflow.processes.watchdog.signals import own_terminations

SECONDS = 30.0  # how long Ray may take to answer a call
T = TypeVar("T")
Call = tuple["Future[Any]", Callable[[], Any]]


class RayLate(RuntimeError):
    """Ray has not answered by the deadline."""


class RayThread:
    """The thread of one connection to Ray. It lives as long as the connection: the kernel ends a Ray that was
    started in a thread together with that thread."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="ray", daemon=True)
        self._thread.start()
        self.stuck = False  # whether nobody waits any more for the call that it makes

    def do(self, call: Callable[[], T], seconds: float) -> T:
        """Make a call, and wait at most so many seconds. Gives or raises what the call does. Raises RayLate
        after the deadline, and for every later call."""
        future: Future[T] = Future()
        if not self.stuck:
            self._calls.put((future, call))
            try:
                wait([future], seconds)
            finally:
                if not future.done():
                    self._give_up()
        if self.stuck:
            raise RayLate(f"Ray has not answered within {seconds:g} s")
        return future.result()

    def _give_up(self) -> None:
        """Leave the call alone. The exit of this process must not wait for it, as Ray's own exit handler
        would."""
        self.stuck = True
        atexit.unregister(ray.shutdown)
        launcher.leave_at_once()
        self.end()

    def end(self) -> None:
        """End the thread after the calls that it has."""
        self._calls.put(None)

    def _work(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, call = asked
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
        if self.stuck:  # what has come about after all is not wanted any more
            with contextlib.suppress(Exception):
                ray.shutdown()


_threads: list[RayThread] = []  # of the connection that this process has, if any


def connect(call: Callable[[], T], seconds: float) -> T:
    """What a call gives that connects this process to a Ray. Raises as ``RayThread.do`` does."""
    disconnect()
    _threads.append(RayThread())
    try:
        with own_terminations():
            return asked(call, seconds)
    except BaseException:
        disconnect()
        raise


def asked(call: Callable[[], T], seconds: float = SECONDS) -> T:
    """What a call of Ray gives. Raises what it raises, and RayLate where Ray does not answer within so many
    seconds."""
    return _threads[-1].do(call, seconds) if _threads else call()  # whose connection is not ours


def disconnect() -> None:
    """Leave the Ray to which ``connect`` has connected this process, and end one that was started here."""
    if _threads:
        with contextlib.suppress(RayLate):
            asked(ray.shutdown)
        _threads.pop().end()
