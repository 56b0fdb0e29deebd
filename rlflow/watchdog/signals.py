"""Ctrl-C, preemption and a closed terminal: the first request ends the run at a point from which it can be resumed, a second ctrl-C ends
it now."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import NoReturn

from rlflow.watchdog import launcher

ASKING = launcher.PASSED_ON  # the launcher above the run passes on what asks the run to stop


class StopSignals:
    """While inside, SIGINT, SIGTERM and SIGHUP ask to stop. Without effect outside the main thread, where Python takes no signals.
    ``wakeup``: a descriptor that takes the number of each signal, even while C code keeps the interpreter's lock; -1 for none."""

    def __init__(self, ask: Callable[[], None], wakeup: int = -1) -> None:
        self._ask, self._wakeup = ask, wakeup
        self._before: dict[int, object] = {}
        self._wakeup_before = -1
        self.asked = False
        self.over = False  # the run has ended, and closes what it has open

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            if self._wakeup >= 0:
                self._wakeup_before = signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
            self._before = {number: signal.signal(number, self._received) for number in heard()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
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
    """While inside, each of these signals ends what is being prepared, as a ctrl-C does: there is nothing to save yet."""

    def received(number: int, frame: FrameType | None) -> NoReturn:
        launcher.seen(number)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, received) for number in heard()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def own_terminations() -> Iterator[None]:
    """For a library that puts handlers of its own in SIGTERM's place, which leave the program, print pages, or are lost in its code: what
    stood there before comes back, and a SIGTERM that came meanwhile is what it would have been, the end of what is being prepared."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before, (seen, written) = signal.getsignal(signal.SIGTERM), os.pipe()
    for file in (seen, written):
        os.set_blocking(file, False)
    wakeup = signal.set_wakeup_fd(written, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, before)
        numbers = b""
        with contextlib.suppress(BlockingIOError):
            numbers = os.read(seen, 1 << 10)
        os.close(seen)
        os.close(written)
        if signal.SIGTERM in numbers:
            raise KeyboardInterrupt


def heard() -> list[signal.Signals]:
    """Those that are not ignored: `nohup` has SIGHUP ignored."""
    return [number for number in ASKING if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN]
