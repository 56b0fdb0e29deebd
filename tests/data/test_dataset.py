"""Facts about a data set."""

import pytest

from rlflow import PlanError
from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.fields import Record
from rlflow.data.scorer import ScorerSpec


def named(name, **fields):
    return Dataset(name, [Record("q", "a")], ByteEncoder(), fields=fields)


def test_several_sources_are_described_by_their_names():
    parts = {
        "a": named("a.parquet", answer="reward_model.ground_truth"),
        "b": named("b.jsonl", prompt="input"),
        "c": named("c.jsonl"),
    }
    both = Dataset("both", [Record("q", "a")], ByteEncoder(), parts=parts)
    assert both.recognised.splitlines() == [parts["a"].recognised, parts["b"].recognised]
    assert "names of verl: answer from 'reward_model.ground_truth'" in parts["a"].recognised


def test_a_scorer_has_a_key_of_sixteen_digits():
    keys = {ScorerSpec("match", settings={"n": n}).key for n in range(3)}
    assert {len(key) for key in keys} == {16}
    assert len(keys) == 3


def of(questions):
    return Dataset(
        "sums", [Record(f"{number} + 1 =", str(number + 1)) for number in range(questions)], ByteEncoder()
    )


@pytest.mark.parametrize(
    ("questions", "held_out", "out"), [(40, 1e-9, 1), (40, 1, 1), (40, 7, 7), (2, 1e-9, 1), (40, 39, 39)]
)
def test_a_share_holds_out_at_least_one_question_and_a_count_exactly(questions, held_out, out):
    training, others = of(questions).split(held_out, 0)
    assert (len(training.records), len(others.records)) == (questions - out, out)
    assert {record.question for record in others.records}.isdisjoint(
        record.question for record in training.records
    )


@pytest.mark.parametrize("held_out", [40, 1.0, -1])
def test_holding_out_all_questions_is_refused(held_out):
    with pytest.raises(PlanError, match=f"{held_out} held out of 40 questions"):
        of(40).split(held_out, 0)
