"""Who asks to stop: the first request is heard once, a second ctrl-C ends at once, and what stood there
before comes back."""

import ctypes
import os
import signal
import threading

import pytest

from rlflow.processes.watchdog.signals import ASKING, StopSignals, ending_at_once, own_terminations


@pytest.fixture
def before():
    handlers = {number: signal.getsignal(number) for number in ASKING}
    yield handlers
    assert {number: signal.getsignal(number) for number in ASKING} == handlers
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize(
    "numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP], [signal.SIGINT]]
)
def test_a_request_is_heard_once(before, numbers):
    asked = []
    with StopSignals(lambda: asked.append(1)) as signals:
        for number in numbers:
            signal.raise_signal(number)
        assert signals.asked
    assert asked == [1]


@pytest.mark.parametrize("first", ASKING)
def test_a_ctrl_c_after_it_ends_at_once(before, first):
    with pytest.raises(KeyboardInterrupt):
        interrupted_after(first)


def interrupted_after(first):
    with StopSignals(lambda: None):
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGINT)


def test_each_number_is_told_at_once(before):
    seen, told = os.pipe()
    os.set_blocking(told, False)
    with StopSignals(lambda: None, told):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert os.read(seen, 10) == bytes([signal.SIGHUP, signal.SIGTERM])
    os.close(seen)
    os.close(told)


@pytest.mark.parametrize("number", ASKING)
def test_while_a_run_is_prepared_each_ends_it(before, number):
    with pytest.raises(KeyboardInterrupt), ending_at_once():
        signal.raise_signal(number)


def test_a_hangup_that_is_ignored_asks_for_nothing(before, monkeypatch):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked = []
        with StopSignals(lambda: asked.append(1)), ending_at_once():
            signal.raise_signal(signal.SIGHUP)
        assert asked == []
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_a_library_that_takes_terminations_has_them_for_as_long_as_its_call(before):
    with pytest.raises(KeyboardInterrupt), ending_at_once():
        terminated_after_native_code()


def terminated_after_native_code():
    """Python does not know that its handler is no longer the one."""
    take = ctypes.CDLL(None).signal
    take.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with own_terminations():
        take(signal.SIGTERM, 1)  # to ignore it
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_outside_of_the_main_thread_nothing_is_heard_and_nothing_breaks(before):
    failures = []

    def elsewhere():
        try:
            with StopSignals(lambda: None), ending_at_once(), own_terminations():
                assert {number: signal.getsignal(number) for number in ASKING} == before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert failures == []
