"""Right, wrong and unreadable answers: exact match, math, and the tasks' own scorers."""

import math

import pytest

from rlflow import Batch, PlanError
from rlflow.data import open_data, prompts_of
from rlflow.rewards import bind, parse_reward
from rlflow.rewards.scorers import exact

pytestmark = pytest.mark.slow  # whole runs, models or processes: each test is short, all together are not


@pytest.mark.parametrize(
    ("completion", "answer", "score"),
    [
        (" 42\n", "42", 1),
        ("42.", "42", 0),
        ("", "42", 0),
        ("so <answer>41</answer>, no: <answer> 42 </answer>", "42", 1),
        ("2 + 2 = 4\n#### 1,004", "He has 1004.\n#### 1004", 1),
        ("#### $18.", "... #### 18", 1),
        ("18", "... #### 18", 1),
        ("the answer is 18", "... #### 18", 0),
        ("#### 18 #### 19", "... #### 18", 0),
    ],
)
def test_answers_are_compared_by_letter_or_final_number(completion, answer, score):
    assert exact(completion=completion, answer=answer) == score


MATH = [
    (r"Thus \boxed{\frac{1}{2}}.", "0.5", 1),
    (r"The answer is $\frac{2}{4}$", r"\frac{1}{2}", 1),
    ("so it is 42", "... so\n#### 42", 1),
    ("<answer>-42</answer>", "-42", 1),
    ("It is $40/2 = $20 for each.\n#### 20", "... #### 20", 1),  # dollars as money
    ("#### 1,420.", "... #### 1420", 1),
    ("#### 42\n\nQuestion: 7 + 8", "... #### 42", 1),
    ("#### 2. Add them\nSo \\boxed{42}.", "... #### 42", 1),  # a heading
    ("12 of them\n#### 41", "... #### 12", 0),
    ("It is $1{,}000$.", "1,000", 1),
    (r"\boxed{x^2 + 2x + 1}", "(x+1)^2", 1),
    (r"\boxed{41}", "42", 0),
    (r"\boxed{1, 2}", r"\{1, 3\}", 0),
    ("", "42", 0),
    ("I do not know", "42", 0),
    (r"\boxed{" * 3000, "42", 0),
    ("(" * 5000 + "42", "42", None),  # in any reading, it is a number in range
    ("\x00\ud800" * 100, "42", 0),
    ("$" * 1001, "42", 0),
    (r"\frac{" * 1000 + "1", "42", 0),
    ("∫" * 500, "42", 0),
]


def test_math_separates_right_from_wrong_and_survives_garbage(pool):
    (reward,) = bind([parse_reward("math")], pool)
    scores = reward.score(Batch.of(completion=[case[0] for case in MATH], answer=[case[1] for case in MATH]))
    assert scores.missing == {}
    for (completion, answer, expected), score in zip(MATH, scores.values.tolist(), strict=True):
        assert score in ((0, 1) if expected is None else (expected,)), (completion[:40], answer)


def test_an_unreadable_reference_answer_makes_the_score_missing(pool):
    (reward,) = bind([parse_reward("math")], pool)
    scores = reward.score(Batch.of(completion=["42", "42"], answer=["", "42"]))
    assert (math.isnan(scores.values[0]), scores.values[1], scores.missing) == (True, 1, {"none": 1})


@pytest.mark.slow
def test_endless_arithmetic_is_killed_or_runs_out_of_memory(pool):
    for completion, timeout, missing in (("9**9**9**9", 1.0, [True]), ("42", 60.0, [False])):
        (reward,) = bind([parse_reward("math")], pool, timeout=timeout)
        scores = reward.score(Batch.of(completion=[completion], answer=["42"]))
        assert scores.values.isnan().tolist() == missing
    assert scores.values.tolist() == [1]


@pytest.mark.parametrize("task", ["chain_sum", "countdown", "power_function"])
def test_the_scorer_of_a_task_scores_its_rows(pool, task):
    data = open_data(task, task={"size": 6}, seed=4)
    (reward,) = bind([parse_reward("task")], pool, data)
    batch = prompts_of(data).take(6)
    right = batch | Batch(
        batch.axis, Batch.of(completion=[f"<answer>{answer}</answer>" for answer in batch["answer"]]).data
    )
    wrong = batch | Batch(batch.axis, Batch.of(completion=["no idea"] * 6).data)
    assert reward.score(right).values.tolist() == [1.0] * 6
    assert reward.score(wrong).values.max() < 0.5
    assert reward.reads == ("completion", "entry")


def test_a_task_without_answers_is_refused(pool):
    with pytest.raises(PlanError, match="neither a scorer of their own"):
        bind([parse_reward("task")], pool, None)
