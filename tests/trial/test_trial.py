"""Eight algorithms as researchers describe them, one file each. They pass check without a warning, run, and
can be sampled ahead of training or are refused with the reason. tests/cluster/test_lineage.py runs them on
pools."""

import json
from pathlib import Path

import pytest
from planned import planned_as  # noqa: F401, a fixture

import rlflow
from rlflow import PlanError
from rlflow.author.load import load_flow
from rlflow.compiler.check.checker import check

HERE = Path(__file__).parent
EMA = HERE.parent / "execution" / "ema.py"
FILES = {
    "raft": "raft",
    "duel": HERE / "duel.py",
    "curriculum": HERE / "curriculum.py",
    "topr": "topr",
    "vapo": "vapo",
    "ema": EMA,
    "cppo": "cppo",
    "gdpo": "gdpo",
}
TRAINED = {"duel": ("left", "right"), "vapo": ("actor", "critic")}
REWARDS = {"gdpo": [f"{HERE}/paid.py:variety", f"{HERE}/paid.py:ended"]}
FLAGS = {"vapo": {"hp.warmup": 0}, "cppo": {"hp.kept": 2}}
# the sampling settings depend on state that only training produces
REFUSED = {"curriculum": "staleness-repeat", "ema": "staleness-chain"}
# runs: one level per iteration; a temperature by progress
INSTEAD = {"curriculum": "", "ema": "--hp.controlled false --staleness 1"}


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def questions(tmp_path):
    path = tmp_path / "questions.jsonl"
    records = [{"prompt": f"question {n}", "answer": str(n), "difficulty": 1 + n % 3} for n in range(40)]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return str(path)


@pytest.mark.parametrize("name", FILES)
def test_a_file_passes_check_without_warnings(name):
    assert not check(load_flow(str(FILES[name]))).problems


@pytest.mark.parametrize("name", FILES)
def test_a_file_runs_and_every_trained_model_takes_steps(name, questions, tmp_path):
    settings = {
        "prompts": 6,
        "iterations": 2,
        "threads": 1,
        "save_every": 0,
        "held_out": 0,
        "hp.samples": 3,
        "hp.max_tokens": 6,
    }
    settings |= FLAGS.get(name, {}) | ({"reward": REWARDS[name]} if name in REWARDS else {})
    lines = metrics(
        rlflow.run(str(FILES[name]), backend="null", data=questions, out=str(tmp_path), **settings).folder
    )
    lines = [line for line in lines if "seconds" in line]
    assert len(lines) == 2
    for role in TRAINED.get(name, ("actor",)):
        assert all(line[f"{role}.update/steps"] >= 1 and line[f"{role}.update/rows"] >= 4 for line in lines)


@pytest.mark.parametrize("name", FILES)
def test_a_file_can_sample_ahead_or_gives_the_reason(name, planned_as):  # noqa: F811
    placed, ahead = f"{FILES[name]} --pools train=1,rollout=1", "--staleness 1"
    if name in REFUSED:
        with pytest.raises(PlanError) as refused:
            planned_as(f"{placed} {ahead}")
        assert [problem.code for problem in refused.value.problems] == [REFUSED[name]]
        ahead = INSTEAD[name]
    assert planned_as(f"{placed} {ahead}").placement.pools == {"train": 1, "rollout": 1}


def test_a_curriculum_samples_no_question_above_its_level(questions, tmp_path):
    """A third of the records has the lowest level, and after two rises none is too hard."""
    keywords = {
        "backend": "null",
        "data": questions,
        "prompts": 6,
        "iterations": 4,
        "threads": 1,
        "held_out": 0,
        "save_every": 0,
        "hp.high": 0.0,
        "hp.low": 0.0,
    }
    folder = rlflow.run(str(FILES["curriculum"]), out=str(tmp_path), **keywords).folder
    lines = [line for line in metrics(folder) if "moved/level" in line]
    assert [line["moved/level"] for line in lines] == [1, 2, 3, 4]
    assert [line["repeat.of_level/kept"] for line in lines] == [4] * 4
    dropped = [line["choose/dropped"] for line in lines]
    # of both tries
    assert dropped[0] == 2 * 6 - 4 - lines[0]["repeat.of_level/surplus"]
    assert dropped[0] > dropped[1] > dropped[2] == dropped[3] == 0
