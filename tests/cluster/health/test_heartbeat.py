"""The heartbeat of a worker: the innermost call of each busy thread, and how long it has run."""

import threading

import pytest

from rlflow.cluster.health.heartbeat import Marks


def names(marks):
    return sorted(what for what, _ in marks.now())


def test_the_innermost_call_of_a_thread_is_named():
    marks = Marks()
    assert marks.now() == ()
    with marks.during("update"):
        with marks.during("loss"):
            assert names(marks) == ["loss"]
        assert names(marks) == ["update"]
    assert marks.now() == ()


def test_a_call_that_raises_is_over():
    marks = Marks()
    with pytest.raises(ValueError, match="bad"), marks.during("update"):
        raise ValueError("bad")
    assert marks.now() == ()


def test_every_busy_thread_is_named():
    marks, begun, over = Marks(), threading.Event(), threading.Event()

    def other():
        with marks.during("save"):
            begun.set()
            over.wait()

    thread = threading.Thread(target=other)
    with marks.during("update"):
        thread.start()
        begun.wait()
        assert names(marks) == ["save", "update"]
        over.set()
        thread.join()
        assert names(marks) == ["update"]


def test_seconds_count_from_the_start_of_the_call(monkeypatch):
    clock = iter([100.0, 103.5])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    marks = Marks()
    with marks.during("update"):
        assert marks.now() == (("update", 3.5),)
