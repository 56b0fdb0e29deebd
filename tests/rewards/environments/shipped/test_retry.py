"""The environment lets the model repeat a wrong answer."""

from rlflow.rewards.environments.shipped.retry import Retry


def test_a_right_answer_ends_and_a_wrong_one_is_reported():
    episode = Retry()
    episode.reset(" 42 ", seed=0)
    assert episode.step("41").says == " no. "
    assert episode.step("no number").says == " no. "
    last = episode.step(" 42")
    assert (last.reward, last.done, dict(last.log)) == (1.0, True, {"tries": 3})


def test_a_hint_can_tell_if_a_number_is_too_low_or_too_high():
    episode = Retry(less=" less. ", more=" more. ")
    episode.reset("42", seed=0)
    assert [episode.step(said).says for said in ("50", "7", "x")] == [" less. ", " more. ", " no. "]
