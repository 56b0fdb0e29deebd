"""Runs users' async functions concurrently in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from rlflow.processes.clients.later import TimeLimit
from rlflow.rewards import values


class SideBySide:
    """An event loop that stays open as long as its process.

    User code can therefore keep connections and similar objects between calls.
    """

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def close(self) -> None:
        """Close the loop."""
        if self._runner is not None:
            self._runner.close()

    def results(self, waiting: Sequence[Coroutine[Any, Any, Any]]) -> Iterator[Any]:
        """Run coroutines concurrently, and yield their results in order.

        Each result is held back until all earlier ones are there.
        """
        self._runner = self._runner or asyncio.Runner()
        loop = self._runner.get_loop()
        tasks = [loop.create_task(each) for each in waiting]
        try:
            for task in tasks:
                yield loop.run_until_complete(task)
        finally:
            for task in tasks:
                task.cancel()
            # The loop cannot run in a child that user code has forked while the loop was running.
            with contextlib.suppress(RuntimeError):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))

    def scores(self, function: Callable[..., Any], rows: Sequence[Any], timeout: float) -> Iterator[Any]:
        """Call an async reward function for all rows at once, and yield the verdicts in row order.

        A call that takes longer than ``timeout`` seconds is cancelled, and its row's score is missing.
        """
        return self.results([_score(function, row, timeout) for row in rows])


async def _score(function: Callable[..., Any], row: Any, timeout: float) -> Any:
    limit = TimeLimit(timeout)
    try:
        async with limit:
            return values.verdict(await function(**row))
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        return ["timeout", f"no score after {timeout:g} s"] if limit.expired() else values.raised(error)
