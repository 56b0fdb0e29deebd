"""A deadline of an awaitable counts the seconds of its clock."""

import asyncio
import time

import pytest

from rlflow.processes.clients.later import TimeLimit
from rlflow.processes.clients.patience import DEFAULT, left


async def forever(limit):
    async with limit:
        await asyncio.Event().wait()


def test_an_awaitable_is_cancelled_after_its_deadline():
    limit = TimeLimit(0.01)
    with pytest.raises(TimeoutError):
        asyncio.run(forever(limit))
    assert limit.expired()


def test_an_awaitable_has_time_while_the_clock_stands_still():
    began, away = time.monotonic(), [True]
    limit = TimeLimit(0.01, lambda: 0.0 if away[0] else time.monotonic() - began)

    async def waits():
        async with limit:
            await asyncio.sleep(0.03)
            assert left() < DEFAULT
            away[0] = False
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        asyncio.run(waits())
    assert not away[0]
    assert left() == DEFAULT
