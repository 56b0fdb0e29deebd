"""The packaged task has enough questions, and its held-out questions appear nowhere else."""

import json
from pathlib import Path

import pytest

import rlflow.data.tasks
from rlflow.benchmarks import arithmetic
from rlflow.config.packaged import packaged, packaged_environment
from rlflow.data.source import open_data

pytestmark = pytest.mark.slow  # uses real processes, disks or libraries: seconds each

FOLDER = Path(next(iter(rlflow.data.tasks.__path__)))


def drawn(name):
    """Return the settings that decide the questions and the held-out ones."""
    values = packaged(name)[1]
    task = {key.removeprefix("data."): value for key, value in values.items() if key.startswith("data.")}
    return values["data"][0], task, values["held_out"]


@pytest.fixture(scope="module")
def sides():
    data, task, held_out = drawn("ppo")
    training, held_out = open_data(data, task=task).split(held_out)
    return {record.question for record in training.records}, {record.question for record in held_out.records}


def test_there_are_ten_thousand_questions_and_five_hundred_held_out(sides):
    training, held_out = sides
    assert len(training) + len(held_out) >= 10_000
    assert len(held_out) >= 500


def test_training_prompts_contain_no_held_out_question(sides):
    training, held_out = sides
    assert not training & held_out


def test_pretraining_examples_contain_no_held_out_question(sides):
    taught = {record.question for record in arithmetic.questions().records}
    assert len(taught) > 10_000
    assert not taught & sides[1]


def test_shipped_lessons_contain_no_held_out_question(sides):
    lessons = [json.loads(line) for line in (FOLDER / "arithmetic_lessons.jsonl").read_text().splitlines()]
    assert len(lessons) == arithmetic.LESSONS
    assert not {lesson["prompt"] for lesson in lessons} & sides[1]
    assert all(lesson["completion"] == lesson["answer"] for lesson in lessons)


def test_shipped_pairs_contain_no_held_out_question(sides):
    pairs = [json.loads(line) for line in (FOLDER / "arithmetic_pairs.jsonl").read_text().splitlines()]
    assert len(pairs) == arithmetic.PAIRS
    assert not {pair["prompt"] for pair in pairs} & sides[1]
    assert all(pair["chosen"] == pair["answer"] != pair["rejected"] for pair in pairs)


@pytest.mark.parametrize(
    "name", ["grpo", "default", "dapo", "gspo", "opo", "ppo_adaptive", "gmpo", "clip_cov", "prime"]
)
def test_packaged_sums_tasks_hold_out_the_same_questions(name):
    assert drawn(name) == drawn("ppo")


@pytest.mark.parametrize("name", ["arithmetic_model", "arithmetic_teacher"])
def test_the_shipped_models_are_small(name):
    assert sum(path.stat().st_size for path in (FOLDER / name).iterdir()) < 4_000_000


def test_a_flow_without_a_task_gets_the_default():
    assert packaged("something_new")[0] == "default"
    assert Path(packaged("something_new")[1]["model"], "config.json").is_file()


@pytest.mark.parametrize(
    ("values", "there"),
    [
        ({}, {"env": "retry", "env.cost": 0.25, "env.turns": 3}),
        ({"env.turns": "2"}, {"env": "retry", "env.cost": 0.25, "env.turns": 3}),
        ({"env": "mine.py:Mine"}, {}),
        ({"actor.env": "search"}, {}),
        ({"model": "FOLDER"}, {}),
        ({"backend": "null"}, {}),
    ],
)
def test_a_given_environment_replaces_the_environment_of_a_task(values, there):
    assert packaged_environment("ppo_turns", values) == there
