"""Stop requests: the first is reported once, a second ctrl-C ends at once, and the previous handlers are
restored."""

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
def test_a_request_is_reported_once(before, numbers):
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


def test_each_signal_is_reported_at_once(before):
    seen, told = os.pipe()
    os.set_blocking(told, False)
    with StopSignals(lambda: None, told):
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
    assert os.read(seen, 10) == bytes([signal.SIGHUP, signal.SIGTERM])
    os.close(seen)
    os.close(told)


@pytest.mark.parametrize("number", ASKING)
def test_every_request_ends_the_preparation_of_a_run(before, number):
    with pytest.raises(KeyboardInterrupt), ending_at_once():
        signal.raise_signal(number)


def test_an_ignored_hangup_requests_nothing(before, monkeypatch):
    handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked = []
        with StopSignals(lambda: asked.append(1)), ending_at_once():
            signal.raise_signal(signal.SIGHUP)
        assert asked == []
    finally:
        signal.signal(signal.SIGHUP, handler)


def test_a_library_gets_terminations_only_during_its_call(before):
    with pytest.raises(KeyboardInterrupt), ending_at_once():
        terminated_after_native_code()


def terminated_after_native_code():
    """Native code replaced the handler, and Python does not know it."""
    take = ctypes.CDLL(None).signal
    take.argtypes = [ctypes.c_int, ctypes.c_void_p]
    with own_terminations():
        take(signal.SIGTERM, 1)  # to ignore the signal
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


def test_other_threads_install_no_handlers(before):
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
