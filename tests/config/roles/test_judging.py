"""A judge of held-out answers returns scores and the answers within responses, by source of data."""

import pytest
import torch

from rlflow.author.batch import Batch
from rlflow.author.columns import SOURCE
from rlflow.config.roles.judging import HeldOutJudge
from rlflow.data.scorer import MATCH, ScorerSpec
from rlflow.rewards import RewardPool
from rlflow.rewards.reward import Reward

GRADE = """
def grade(completion):
    return {"score": 0.5, "pred": 7} if completion else {"score": 1, "other": 2.0}
def silent(completion):
    return None
"""


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(1)
    yield pool
    pool.close()


def judge(pool, **scorers):
    return HeldOutJudge.of(
        torch.float32, {name: Reward(name, 1.0, scorer, pool) for name, scorer in scorers.items()}
    )


def function(tmp_path, name):
    file = tmp_path / "own.py"
    file.write_text(GRADE)
    return ScorerSpec(
        "function", ("completion",), settings={"file": str(file), "function": name, "source": GRADE}
    )


def test_a_row_is_scored_by_the_reward_of_its_source(pool, tmp_path):
    rows = Batch.of(
        completion=["<answer> 4 </answer>", "so #### 1,000", "x", "x", ""],
        answer=["4", "a #### 1000", "", "", ""],
        **{SOURCE: ["match", "match", "grade", "silent", "grade"]},
    )
    found = judge(pool, match=MATCH, grade=function(tmp_path, "grade"), silent=function(tmp_path, "silent"))(
        rows
    )
    assert torch.equal(found.scores.nan_to_num(-1.0), torch.tensor([1.0, 1.0, 0.5, -1.0, 1.0]))
    assert found.extracted == ("4", "1000", "7", None, None)


def test_equal_mathematical_answers_get_the_same_vote(pool):
    responses = ["\\boxed{\\frac{1}{2}}", "it is $1/2$", "#### 12", "nothing at all"]
    rows = Batch.of(completion=responses, answer=["0.5", "0.5", "12", "12"])
    found = judge(pool, **{"": ScorerSpec("math")})(rows)
    assert found.scores.tolist() == [1.0, 1.0, 1.0, 0.0]
    assert found.extracted == ("1/2", "1/2", "12", None)
