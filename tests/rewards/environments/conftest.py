"""Pools of scripted environments."""

from contextlib import ExitStack, closing

import pytest
from hung_clock import HungClock
from scenarios import spec_of

from rlflow.rewards.environments.environment_pool import EnvironmentPool


@pytest.fixture
def pooled():
    """Return a function from a class and its settings to a pool."""
    with ExitStack() as pools:
        yield lambda name="Scripted", **settings: pools.enter_context(
            closing(EnvironmentPool(spec_of(name, **{"parallel": 1, "seconds": 5, **settings})))
        )


@pytest.fixture
def patient():
    """The same with one process, where time passes only for a call that has printed that it hangs."""
    clock = HungClock()
    with ExitStack() as pools:
        yield lambda name="Scripted", **settings: pools.enter_context(
            closing(
                EnvironmentPool(spec_of(name, parallel=1, **settings), on_output=clock.on_output, clock=clock)
            )
        )
