"""What a data set says of itself."""

from rlflow.data.dataset import Dataset
from rlflow.data.encode import ByteEncoder
from rlflow.data.fields import Record
from rlflow.data.scorer import ScorerSpec


def named(name, **fields):
    return Dataset(name, [Record("q", "a")], ByteEncoder(), fields=fields)


def test_each_of_several_sources_says_whose_records_it_has():
    parts = {"a": named("a.parquet", answer="reward_model.ground_truth"), "b": named("b.jsonl", prompt="input"), "c": named("c.jsonl")}
    both = Dataset("both", [Record("q", "a")], ByteEncoder(), parts=parts)
    assert both.recognised.splitlines() == [parts["a"].recognised, parts["b"].recognised]
    assert "as verl has them: answer from 'reward_model.ground_truth'" in parts["a"].recognised


def test_a_scorer_is_known_by_sixteen_digits():
    keys = {ScorerSpec("match", settings={"n": n}).key for n in range(3)}
    assert {len(key) for key in keys} == {16}
    assert len(keys) == 3
