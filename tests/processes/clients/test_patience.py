"""A question is asked again while a wait may mend its failure, by a clock of the test's own."""

import pytest

from rlflow.processes.clients.patience import DEFAULT, Passing, Patience, Unanswered, left, within


class Clock:
    """Stands still but for pauses; ``asked``: when a question was put."""

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


def test_pauses_grow_and_an_answer_has_what_is_left_of_the_time():
    clock = Clock(*[busy()] * 8)
    assert clock.answer(60.0) == pytest.approx(60.0 - clock.asked[-1])
    pauses = [later - sooner for sooner, later in zip(clock.asked, clock.asked[1:], strict=False)]
    assert pauses == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0])


def test_a_server_says_how_long_to_wait_at_least():
    clock = Clock(busy(7.0), busy(0.0), busy(0.0))
    clock.answer(60.0)
    assert clock.asked == pytest.approx([0.0, 7.0, 7.2, 7.6])


def test_a_pause_that_the_time_has_no_room_for_ends_the_question_at_once():
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


def test_what_no_wait_mends_is_not_asked_again():
    clock = Clock(Unanswered("reply", "no JSON"))
    with pytest.raises(Unanswered, match="^no JSON$"):
        clock.answer(60.0)
    assert clock.asked == [0.0]


def test_a_question_within_a_call_ends_before_the_call():
    now = [100.0]
    assert left() == DEFAULT
    with within(20.0, lambda: now[0]):
        assert 18.0 < left(lambda: now[0]) < 20.0
        now[0] += 30.0
        assert left(lambda: now[0]) > 0.0
    assert left() == DEFAULT
