from rlflow.services.member import Silence


class Clock:
    now = used = 0.0

    def pass_(self, seconds, used=0.0):
        self.now += seconds
        self.used += used


def watched(most=5.0):
    clock = Clock()
    return clock, Silence(most, lambda: clock.used, lambda: clock.now)


def test_a_silent_idle_process_lasts_too_long():
    clock, silence = watched()
    lasted = []
    for _ in range(3):
        clock.pass_(2.0)
        lasted.append(silence.lasts(True))
    assert lasted == [False, False, True]


def test_a_computing_or_answering_process_does_not_last_too_long():
    for used, silent in ((1.0, True), (0.0, False)):
        clock, silence = watched()
        for number in range(10):
            clock.pass_(2.0, used if number % 2 else 0.0)
            assert not silence.lasts(silent or number % 2 == 0)


def test_time_without_observation_does_not_count():
    clock, silence = watched(10.0)
    clock.pass_(1000.0)
    assert not silence.lasts(True)
