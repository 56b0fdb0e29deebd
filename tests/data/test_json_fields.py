"""Rewards that read fields of the data get the values of the file."""

import json
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sources import TASKS

import rlflow
from rlflow import FlowError
from rlflow.author.batch import Batch, Data
from rlflow.author.columns import field_column
from rlflow.cli.check import check_flow
from rlflow.data import open_data
from rlflow.data.json_fields import Wanted, choose_fields, given_back, packed
from rlflow.rewards import RewardPool, bind, parse_reward
from rlflow.rewards.reward_spec import wanted

FILE = """
import asyncio

def typed(completion, label, meta, spare="none"):
    return {"score": label[0], "depth": meta["a"]["b"], "spare": spare == "none", "word": "no number", "bad key": 1, "far": float("inf")}
def mapped(completion, label): return float(label)
def rest(completion, **fields): return {"score": 1, "label": fields["label"][0], "count": len(fields)}
def misspelled(completion, lable): return 1.0
async def later(completion, label):
    await asyncio.sleep(0)
    return {"score": label[0]}
"""
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[RewardPool]:
    with RewardPool(1) as pool:
        yield pool


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "judge.py").write_text(FILE)
    return str(tmp_path / "judge.py")


@pytest.fixture
def data(tmp_path: Path) -> str:
    records = [
        {"prompt": f"q{i}", "answer": "1", "label": [i, None], "meta": {"a": {"b": 2 * i}}} for i in range(4)
    ]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(tmp_path / "d.jsonl")


def score_records(pool, data, reward, timeout=240.0, **fields):
    spec = parse_reward(reward)
    opened = open_data(data, wanted=wanted([spec]), fields=fields or None)
    batch = opened.batch(range(len(opened)))
    batch |= completions(batch)
    return bind([spec], pool, opened, timeout)[0].score(batch)


def completions(batch):
    return Batch(batch.axis, {"completion": Data(rlflow.text, ("x",) * len(batch))})


def test_a_parameter_that_is_no_column_gets_the_field_unchanged(pool, file, data):
    scores = score_records(pool, data, f"{file}:typed")
    assert scores.values.tolist() == [0, 1, 2, 3]
    assert {key: numbers.tolist() for key, numbers in scores.others.items()} == {
        "depth": [0, 2, 4, 6],
        "spare": [1] * 4,
    }


def test_a_field_is_mapped_by_its_parameter(pool, file, data):
    assert score_records(pool, data, f"{file}:mapped", label="meta.a.b").values.tolist() == [0, 2, 4, 6]


def test_keyword_arguments_get_all_fields(pool, file, data):
    scores = score_records(pool, data, f"{file}:rest")
    assert scores.others["label"].tolist() == [0, 1, 2, 3]
    assert scores.others["count"].tolist() == [4] * 4  # prompt, answer, label, meta


def test_columns_override_fields_and_unused_fields_are_not_carried(file, data):
    assert [
        name
        for name in open_data(data, wanted=Wanted({"answer": True, "prompt": True})).columns
        if "." in name
    ] == []
    assert open_data(data).digest == open_data(data, wanted=Wanted({"answer": True})).digest
    assert field_column("label") in open_data(data, wanted=Wanted({"label": True})).columns


def test_a_missing_required_field_is_refused_with_its_line(tmp_path, data):
    Path(data).write_text(Path(data).read_text() + '{"prompt": "q", "answer": "1"}\n')
    with pytest.raises(rlflow.PlanError, match=r"d.jsonl:5: the record has no field 'label'"):
        open_data(data, wanted=Wanted({"label": True}))
    column = open_data(data, wanted=Wanted({"label": False})).batch([0, 4])[field_column("label")]
    assert [given_back({field_column("label"): text}) for text in column] == [{"label": [0, None]}, {}]


def test_an_unknown_parameter_is_refused_with_its_function_and_fields(file, data, tmp_path):
    with pytest.raises(
        FlowError,
        match=r"needs column 'lable'(.|\n)*judge.py:8(.|\n)*fields of the data prompt, answer, label, meta"
        r"(.|\n)*--data.lable label",
    ):
        rlflow.run(
            "grpo", backend="null", data=data, reward=f"{file}:misspelled", out=str(tmp_path), held_out=0
        )


def test_an_async_function_is_awaited(pool, file, data):
    assert score_records(pool, data, f"{file}:later").values.tolist() == [0, 1, 2, 3]


@given(VALUES)
def test_a_json_value_comes_back_unchanged(value):
    chosen = choose_fields([{"field": value}], Wanted({"field": True}), {}, ())
    assert chosen.columns == {field_column("field"): "field"}
    assert given_back({field_column("field"): packed({"field": value}, "field")}) == {"field": value}


@given(st.dictionaries(st.text(min_size=1), VALUES), st.sets(st.text(min_size=1)))
def test_keyword_arguments_keep_every_field_that_is_no_column(record, columns):
    chosen = choose_fields([record], Wanted(everything=True), {}, columns)
    assert given_back({column: packed(record, source) for column, source in chosen.columns.items()}) == {
        name: value for name, value in record.items() if name not in columns
    }


def test_check_knows_the_fields_of_a_named_file(file, data):
    def columns(*flags):
        report = check_flow("grpo", [f"--reward={file}:typed", *flags])
        return [problem.expected for problem in report.problems if problem.severity == "error"]

    model = ("--model", str(TASKS / "arithmetic_model"))
    assert columns("--data", data, *model) == []
    assert [text.partition(",")[0] for text in columns()] == ["column 'label'", "column 'meta'"]
    Path(data).write_text('{"prompt": "p", "label": [1]}\n')
    assert [text.partition(",")[0] for text in columns("--data", data, *model)] == ["column 'meta'"]
    assert columns("--data", data, "--data.meta", "label", *model) == []


def test_a_value_outside_json_is_given_as_text():
    assert given_back({"data.day": packed({"day": date(2026, 1, 2)}, "day")}) == {"day": "2026-01-02"}


def test_a_field_that_only_a_later_record_has_is_carried():
    records = [{"prompt": "a", "x": 1}, {"prompt": "b", "y": {"z": 2}}]
    everything = choose_fields(records, Wanted({}, everything=True), {}, {"prompt"})
    assert list(everything.columns.values()) == ["x", "y"]
    named = choose_fields(iter(records), Wanted({"y.z": False, "none": False}), {}, {"prompt"})
    assert list(named.columns.values()) == ["y.z"]
