"""A row's score is its own, whichever rows are judged beside it; and of a reward that draws by chance nothing is said."""

import pytest
import torch

from rlflow.proof.rehearsal import JudgedRows
from rlflow.proof.reward_claims import of_rows

SCORES = torch.tensor([0.0, 1.0, 0.5, float("nan")])


@pytest.mark.parametrize(("again", "shuffled", "verdict", "number"), [
    (SCORES, SCORES + 1e-5, "proved", "0 of 4"),
    (SCORES, SCORES[[1, 0, 2, 3]], "falsified", "2 of 4"),
    (SCORES, SCORES[[0, 1, 3, 2]], "falsified", "2 of 4"),
    (SCORES[[1, 0, 2, 3]], SCORES, "unproved", "2 of 4"),
])  # fmt: skip
def test_scores_that_go_to_other_rows_are_counted(again, shuffled, verdict, number):
    claim = of_rows(JudgedRows("reward", SCORES, again, shuffled))
    assert claim.verdict == verdict
    assert claim.number.startswith(number)


@pytest.mark.parametrize("scores", [torch.ones(3), torch.ones(0)])
def test_of_equal_scores_nothing_is_shown(scores):
    assert of_rows(JudgedRows("reward", scores, scores, scores)).verdict == "unproved"


def test_a_reward_that_gives_no_row_a_score_is_named_with_the_reason():
    none = torch.full((3,), float("nan"))
    claim = of_rows(JudgedRows("reward", none, none, none), reasons={"judge/raised": "RuntimeError: no such judge"})
    assert claim.verdict == "falsified"
    assert "gives no row a score (3 rows; judge/raised: RuntimeError: no such judge)" in str(claim)
