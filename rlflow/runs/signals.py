"""Ctrl-C and preemption: the first request ends the run at a point from which it can be resumed, a second ctrl-C ends it now."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType


class StopSignals:
    """While inside, SIGINT and SIGTERM ask to stop. Without effect outside the main thread, where Python takes no signals."""

    def __init__(self, ask: Callable[[], None]) -> None:
        self._ask = ask
        self._before: dict[int, object] = {}
        self.asked = False

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _received(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.asked = True
        self._ask()
