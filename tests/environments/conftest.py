"""Pools of scripted environments."""

from contextlib import ExitStack, closing

import pytest
from scenarios import spec_of

from rlflow.environments.pool import EnvironmentPool


@pytest.fixture
def pooled():
    """A function from a class and its settings to a pool."""
    with ExitStack() as pools:
        yield lambda name="Scripted", **settings: pools.enter_context(
            closing(EnvironmentPool(spec_of(name, **{"parallel": 1, "seconds": 5, **settings}))))
