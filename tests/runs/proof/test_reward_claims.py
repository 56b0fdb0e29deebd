"""Claims about rewards: the score of a row does not depend on the other rows of a call. A random reward gets
no claim."""

import pytest
import torch

from rlflow.runs.proof.dry_run import RepeatedScores, uneven
from rlflow.runs.proof.reward_claims import differing, of_rows, reward_claims

SCORES = torch.tensor([0.0, 1.0, 0.5, float("nan")])


@pytest.mark.parametrize(
    ("again", "shuffled", "verdict", "number"),
    [
        (SCORES, SCORES + 1e-5, "proved", "0 of 4"),
        (SCORES, SCORES[[1, 0, 2, 3]], "falsified", "2 of 4"),
        (SCORES, SCORES[[0, 1, 3, 2]], "falsified", "2 of 4"),
        (SCORES[[1, 0, 2, 3]], SCORES, "unproved", "2 of 4"),
    ],
)
def test_scores_assigned_to_other_rows_are_counted(again, shuffled, verdict, number):
    claim = of_rows(RepeatedScores("reward", SCORES, again, shuffled))
    assert claim.verdict == verdict
    assert claim.number.startswith(number)


@pytest.mark.parametrize("scores", [torch.ones(3), torch.ones(0)])
def test_equal_scores_prove_nothing(scores):
    assert of_rows(RepeatedScores("reward", scores, scores, scores)).verdict == "unproved"


def test_a_reward_that_gives_no_row_a_score_is_named_with_the_reason():
    none = torch.full((3,), float("nan"))
    claim = of_rows(
        RepeatedScores("reward", none, none, none), reasons={"judge/raised": "RuntimeError: no such judge"}
    )
    assert claim.verdict == "falsified"
    assert "it scores no row (3 rows; judge/raised: RuntimeError: no such judge)" in str(claim)


def test_missing_scores_are_counted_separately():
    claim = of_rows(RepeatedScores("reward", SCORES, SCORES, SCORES), reasons={"judge/raised": "no\n judge"})
    assert claim.number == (
        "0 of 4 rows get a different score if the same rows are shuffled; 1 have no score; "
        "judge/raised: no judge"
    )
    assert of_rows(RepeatedScores("reward", SCORES[:3], SCORES[:3], SCORES[:3])).number.endswith(
        "if the same rows are shuffled"
    )


@pytest.mark.parametrize(
    ("other", "count"),
    [([0.0, 1.0, float("nan")], 0), ([0.1, 1.2, float("nan")], 1), ([0.0, float("nan"), 0.0], 2)],
)
def test_scores_differ_only_beyond_a_tolerance(other, count):
    assert differing(torch.tensor([0.0, 1.0, float("nan")]), torch.tensor(other), 0.1) == count


def test_equal_scores_other_than_0_prove_nothing():
    claim = of_rows(RepeatedScores("reward", torch.ones(3), torch.ones(3), torch.zeros(3)))
    assert claim.sentence == "it gives all rows of the dry run the same score"


def test_each_call_of_a_reward_has_a_claim_with_its_line(grpo):
    [claim] = reward_claims(grpo.stage, dict, uneven(0))
    assert (claim.name, claim.subject, claim.verdict) == ("reward-rows", "reward", "proved")
    assert claim.place.path.endswith("grpo.py")
