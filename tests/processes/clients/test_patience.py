"""A request is retried while a wait may fix its failure, with a clock of the test."""

import pytest

from rlflow.processes.clients.patience import DEFAULT, Passing, Patience, Unanswered, left, within


class Clock:
    """A clock that moves only in pauses; ``asked``: the times of the requests."""

    def __init__(self, *failures):
        self.now, self.failures, self.asked = 0.0, list(failures), []

    def pause(self, seconds):
        self.now += seconds

    def ask(self, left):
        self.asked.append(self.now)
        if self.failures:
            raise self.failures.pop(0)
        return left

    def answer(self, seconds):
        return Patience(lambda: self.now, self.pause).answer(self.ask, seconds)


def busy(after=None):
    return Passing("status", "503", after)


def test_pauses_grow_and_an_answer_gets_the_remaining_time():
    clock = Clock(*[busy()] * 8)
    assert clock.answer(60.0) == pytest.approx(60.0 - clock.asked[-1])
    pauses = [later - sooner for sooner, later in zip(clock.asked, clock.asked[1:], strict=False)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_server_sets_the_minimum_pause():
    clock = Clock(busy(7.0), busy(0.0), busy(0.0))
    clock.answer(60.0)
    assert clock.asked == pytest.approx([0.0, 7.0, 7.2, 7.6])


def test_a_pause_beyond_the_deadline_ends_the_request():
    clock = Clock(busy(61.0))
    with pytest.raises(Unanswered, match=r"503 \(1 try in 0 of 60 s\)"):
        clock.answer(60.0)
    assert clock.asked == [0.0]


def test_the_last_try_comes_shortly_before_the_end():
    clock = Clock(*[busy()] * 1000)
    with pytest.raises(Unanswered, match=r"503 \(\d\d tries in 60 of 60 s\)") as error:
        clock.answer(60.0)
    assert error.value.cause == "status"
    assert not isinstance(error.value, Passing)
    assert 59.0 < clock.asked[-1] <= 60.0
    assert len(clock.asked) < 40


def test_a_permanent_failure_is_not_retried():
    clock = Clock(Unanswered("reply", "no JSON"))
    with pytest.raises(Unanswered, match="^no JSON$"):
        clock.answer(60.0)
    assert clock.asked == [0.0]


def test_a_request_within_a_call_ends_before_the_call():
    now = [100.0]
    assert left() == DEFAULT
    with within(20.0, lambda: now[0]):
        assert 18.0 < left(lambda: now[0]) < 20.0
        now[0] += 30.0
        assert left(lambda: now[0]) > 0.0
    assert left() == DEFAULT
