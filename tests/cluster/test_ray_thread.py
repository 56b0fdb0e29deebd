"""A hanging call of Ray has a deadline and does not block signals."""

import os
import signal
import threading

import pytest

from rlflow import cluster
from rlflow.cluster.ray_thread import RayLate, RayThread, asked, connect
from rlflow.processes.watchdog import launcher
from rlflow.processes.watchdog.signals import ending_at_once


@pytest.fixture(autouse=True)
def staying(monkeypatch):
    monkeypatch.setattr(launcher, "_at_once", False)


@pytest.fixture
def hung():
    """A call that returns only at the end of the test."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_calls_run_in_order_in_one_thread_and_raise_their_errors():
    thread = RayThread()
    first = thread.do(threading.get_ident, 30.0)
    assert thread.do(threading.get_ident, 30.0) == first != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        thread.do(lambda: 1 // 0, 30.0)
    with pytest.raises(TimeoutError, match="its own"):
        thread.do(lambda: (_ for _ in ()).throw(TimeoutError("its own")), 30.0)
    assert not launcher.leaves_at_once()
    thread.end()


def test_a_hanging_call_ends_the_wait_and_later_calls_do_not_wait(hung):
    thread = RayThread()
    for call in (hung, threading.get_ident):
        with pytest.raises(RayLate, match="did not answer"):
            thread.do(call, 0.05)
    assert launcher.leaves_at_once()  # an exit handler could wait for the call


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(hung, number):
    thread = RayThread()
    with pytest.raises(KeyboardInterrupt), ending_at_once():
        thread.do(lambda: (os.kill(os.getpid(), number), hung()), 60.0)
    assert thread.stuck


def test_a_connection_that_fails_leaves_no_thread_behind():
    with pytest.raises(ZeroDivisionError):
        connect(lambda: 1 // 0, 30.0, "late")
    assert asked(threading.get_ident) == threading.get_ident()  # this process has no connection


def test_every_public_name_of_the_package_can_be_imported():
    assert all(getattr(cluster, name) is not None for name in cluster.__all__)
