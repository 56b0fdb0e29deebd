"""Time limits for async calls that don't count restarts of the run's services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from rlflow.processes.clients import outages
from rlflow.processes.clients.patience import within


class TimeLimit:
    """Like ``asyncio.timeout``, but its clock stops while one of the run's services restarts.

    HTTP requests inside the context get a slightly earlier deadline.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = outages.clock) -> None:
        self._seconds, self._clock, self._limit = seconds, clock, asyncio.Timeout(None)

    def expired(self) -> bool:
        """Whether the time limit has passed."""
        return self._limit.expired()

    async def __aenter__(self) -> None:
        self._loop, self._until = asyncio.get_running_loop(), self._clock() + self._seconds
        await self._limit.__aenter__()
        self._coming = self._loop.call_later(self._seconds, self._look)
        self._questions = within(self._seconds, self._clock)
        self._questions.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._coming.cancel()
        self._questions.__exit__(None, None, None)
        await self._limit.__aexit__(kind, error, trace)

    def _look(self) -> None:
        if (left := self._until - self._clock()) > 0:
            self._coming = self._loop.call_later(left, self._look)
        else:
            self._limit.reschedule(self._loop.time())
