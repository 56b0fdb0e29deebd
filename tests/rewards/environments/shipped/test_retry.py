"""A wrong answer may be given again."""

from rlflow.rewards.environments.shipped.retry import Retry


def test_a_right_answer_ends_and_a_wrong_one_is_told_of():
    episode = Retry()
    episode.reset(" 42 ", seed=0)
    assert episode.step("41").says == " no. "
    assert episode.step("no number").says == " no. "
    last = episode.step(" 42")
    assert (last.reward, last.done, dict(last.log)) == (1.0, True, {"tries": 3})


def test_which_way_a_number_is_wrong_can_be_told():
    episode = Retry(less=" less. ", more=" more. ")
    episode.reset("42", seed=0)
    assert [episode.step(said).says for said in ("50", "7", "x")] == [" less. ", " more. ", " no. "]
