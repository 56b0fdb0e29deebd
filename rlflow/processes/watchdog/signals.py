"""Signals that ask a run to stop: Ctrl-C, preemption and a closed terminal.

After the first one, the run stops where it can be resumed. A second Ctrl-C ends it at once.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import NoReturn, Self

from rlflow.processes.watchdog import launcher

ASKING = launcher.PASSED_ON  # the launcher passes on the signals that ask the run to stop


class StopSignals:
    """Calls ``ask`` when the first signal to stop arrives inside the context.

    The signals are SIGINT, SIGTERM and SIGHUP. After the first, another Ctrl-C raises KeyboardInterrupt. Has
    no effect outside the main thread, the only one in which Python handles signals. ``wakeup``: a file
    descriptor that gets the number of each signal, even while C code holds the interpreter's lock, or -1.
    """

    def __init__(self, ask: Callable[[], None], wakeup: int = -1) -> None:
        self._ask, self._wakeup = ask, wakeup
        self._before: dict[int, object] = {}
        self._wakeup_before = -1
        self.asked = False  # whether a signal has asked to stop
        self.over = False  # whether the run has ended and is closing

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            if self._wakeup >= 0:
                self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._received) for number in stopping()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before and self._wakeup >= 0:
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _received(self, number: int, frame: FrameType | None) -> None:
        launcher.seen(number)
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.asked:
            self.asked = True
            self._ask()


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Raise KeyboardInterrupt for any signal to stop that arrives inside the context.

    Use this for work that has nothing to save, such as preparing a run or waiting for other runs. Has no
    effect outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def received(number: int, frame: FrameType | None) -> NoReturn:
        launcher.seen(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, received) for number in stopping()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def own_terminations() -> Iterator[None]:
    """Restore the handler of SIGTERM at the end of the context.

    Use this around calls of a library whose native code may replace the handler. Has no effect outside the
    main thread.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def signals_to(wakeup: int) -> Iterator[None]:
    """Inside the context, write the number of each signal to the file descriptor ``wakeup``.

    This works even while C code holds the interpreter's lock. Has no effect if ``wakeup`` is -1, or outside
    the main thread.
    """
    if wakeup < 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)


def stopping() -> list[signal.Signals]:
    """Return the signals that ask a run to stop. SIGHUP is left out if it is ignored, as under `nohup`."""
    return [
        number for number in ASKING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
