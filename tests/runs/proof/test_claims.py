"""A claim states its subject, its verdict and a number."""

from rlflow.errors import Place
from rlflow.runs.proof.claims import Claim, judged, summary

PLACE = Place("grpo.py", 7)


def test_a_falsified_claim_has_a_place_and_every_claim_a_number():
    right = judged("reward-direction", "actor.update", True, ("it is", "it is not"), "correlation 0.9", PLACE)
    wrong = judged(
        "reward-direction", "actor.update", False, ("it is", "it is not"), "correlation -0.9", PLACE
    )
    assert str(right) == "proved     actor.update: it is (correlation 0.9)"
    assert str(wrong) == "falsified  grpo.py:7: actor.update: it is not (correlation -0.9)"


def test_the_summary_counts_verdicts():
    assert (
        summary([Claim("a", "b", "proved", "c"), Claim("a", "b", "unproved", "c")])
        == "1 proved, 0 falsified, 1 unproved"
    )
