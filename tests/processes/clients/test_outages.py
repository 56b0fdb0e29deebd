"""The clock of requests stands still while a service of the run is down."""

import time

import pytest

from rlflow.processes.clients import outages
from rlflow.processes.clients.outages import VARIABLE, Outages


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The outage file of this process's run, and a monotonic clock that the test moves."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "outages"))
    return Outages(tmp_path / "outages")


@pytest.fixture
def now(monkeypatch):
    seconds = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    return seconds


def test_without_an_outage_the_clock_is_monotonic_time(now, file):
    assert outages.clock() == 1000.0
    file.last_until(0.0)
    assert outages.clock() == 1000.0


def test_seconds_of_an_outage_do_not_count(now, file):
    file.last_until(1060.0)
    now[0] = 1020.0
    assert outages.clock() == 1000.0
    file.last_until(0.0)
    now[0] = 1030.0
    assert outages.clock() == 1010.0
    file.last_until(1090.0)  # the next outage
    now[0] = 1040.0
    assert outages.clock() == 1010.0


def test_an_outage_beyond_its_limit_is_not_awaited(now, file):
    file.last_until(1060.0)
    now[0] = 1100.0
    assert outages.clock() == 1040.0
    file.last_until(0.0)
    assert outages.clock() == 1040.0


def test_a_service_that_dies_while_starting_is_awaited_again(now, file):
    file.last_until(1010.0)
    now[0] = 1005.0
    file.last_until(1015.0)
    now[0] = 1014.0
    assert outages.clock() == 1000.0


@pytest.mark.parametrize("content", ["", "x", "m 1 2", "m 1 2 3 4", "another-machine 5 990 1060"])
def test_an_empty_file_is_no_outage(content, now, file):
    file.file.write_text(content)
    assert outages.clock() == 1000.0
