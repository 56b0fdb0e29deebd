"""Who asks to stop: the first request is heard once, a second ctrl-C ends at once, and what stood there before comes back."""

import os
import signal
import threading

import pytest

from rlflow.watchdog.signals import ASKING, StopSignals, ending_at_once, own_terminations


@pytest.fixture
def before():
    handlers = {number: signal.getsignal(number) for number in ASKING}
    yield handlers
    assert {number: signal.getsignal(number) for number in ASKING} == handlers
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("numbers", [[signal.SIGTERM], [signal.SIGHUP, signal.SIGTERM, signal.SIGHUP], [signal.SIGINT]])
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


def taken_over(leave):
    """A library that puts a handler of its own in place."""
    with own_terminations():
        signal.signal(signal.SIGTERM, leave)
        signal.raise_signal(signal.SIGTERM)


def leave(number, frame):
    raise SystemExit(number)


@pytest.mark.parametrize("handler", [leave, lambda number, frame: None])
def test_what_a_library_does_about_a_termination_is_a_ctrl_c(before, handler):
    with pytest.raises(KeyboardInterrupt):
        taken_over(handler)


def test_what_it_raises_besides_is_raised(before):
    with pytest.raises(SystemExit, match="3"), own_terminations():
        raise SystemExit(3)
    with own_terminations():
        pass


def descriptors():
    return sorted(os.listdir("/proc/self/fd"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not list them")
def test_no_descriptor_stays_open_whether_or_not_a_termination_came(before):
    open_before = descriptors()
    with own_terminations(), ending_at_once():
        pass
    with pytest.raises(KeyboardInterrupt):
        taken_over(lambda number, frame: None)
    assert descriptors() == open_before


def test_outside_of_the_main_thread_nothing_is_heard_and_nothing_breaks(before):
    failures = []

    def elsewhere():
        try:
            with StopSignals(lambda: None), own_terminations():
                assert {number: signal.getsignal(number) for number in ASKING} == before
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert failures == []
