"""Rows whose scores an async function awaits side by side in one process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rlflow.processes.clients.later import TimeLimit
from rlflow.rewards import values


class AsyncRows:
    """An event loop that lives as long as its process, so that what a reward keeps between calls, such as connections, stays usable."""

    def __init__(self) -> None:
        self._runner: asyncio.Runner | None = None

    def close(self) -> None:
        """End the loop."""
        if self._runner is not None:
            self._runner.close()

    def scores(self, function: Callable[..., Any], rows: Sequence[Any], timeout: float) -> Iterator[Any]:
        """The verdict of each row, in order, each as soon as it and those before it are there. A row that awaits longer than ``timeout``
        seconds is cancelled, and missing."""
        self._runner = self._runner or asyncio.Runner()
        loop = self._runner.get_loop()
        tasks = [loop.create_task(_score(function, row, timeout)) for row in rows]
        try:
            for task in tasks:
                yield loop.run_until_complete(task)
        finally:
            for task in tasks:
                task.cancel()
            with contextlib.suppress(RuntimeError):  # in a child that the function forked while the loop was running
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))


async def _score(function: Callable[..., Any], row: Any, timeout: float) -> Any:
    limit = TimeLimit(timeout)
    try:
        async with limit:
            return values.verdict(await function(**row))
    except BaseException as error:  # a user's function may raise anything, SystemExit included
        return ["timeout", f"no score after {timeout:g} s"] if limit.expired() else values.raised(error)
