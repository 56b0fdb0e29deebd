"""The names of figures in metrics.jsonl, and the table of names."""

import json

import pytest

from rlflow.author.figures import SECONDS, Figure, Of
from rlflow.monitoring.keys import FILE, FigureNames, by_figure, completed, is_evaluation, read

OWN = Figure(Of.ROWS, "policy/entropy")
AUTHORS = Figure(Of.STAGE, "entropy", "policy")


def test_every_figure_has_a_name_of_its_own(tmp_path):
    names = FigureNames()
    assert [
        names.of(each)
        for each in (OWN, AUTHORS, Figure(Of.STATE, "seconds"), SECONDS, Figure(Of.STATE, "iteration"))
    ] == ["policy/entropy", "policy/entropy (stage)", "seconds", "seconds (run)", "iteration (state)"]
    (tmp_path / FILE).write_bytes(names.packed())
    again = FigureNames(read(tmp_path))
    assert (again.of(AUTHORS), again.of(OWN)) == ("policy/entropy (stage)", "policy/entropy")
    assert by_figure({"policy/entropy (stage)": 1.0, "seconds": 2.0}, read(tmp_path)) == {
        AUTHORS: 1.0,
        Figure(Of.STATE, "seconds"): 2.0,
    }


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"a": 1}', '{"a": {"of": "nothing", "name": "b"}}', '{"a": {"of": "run"}}']
)
def test_an_unreadable_table_is_empty(tmp_path, content):
    (tmp_path / FILE).write_text(content)
    assert read(tmp_path) == read(tmp_path / "none") == {} or read(tmp_path) == {"a": Figure(Of.RUN, "")}


def test_a_stage_called_evaluation_is_no_evaluation():
    table = {"evaluation/sampled": Figure(Of.STAGE, "sampled", "evaluation")}
    assert not is_evaluation(table, {"iteration": 1, "evaluation/sampled": 0.5})
    assert is_evaluation({}, {"iteration": 1, "evaluation/sampled": 0.5})


def test_names_without_a_table_are_taken_literally():
    keys = [
        "actor.update/loss",
        "judge/mean",
        "judge/missing",
        "judge/math_mean",
        "solver/policy/entropy",
        "reward/flat_groups",
        "tools/steps",
        "repeat.body/kept",
        "env/turns",
        "scores/gsm8k",
        "canary/actor_max",
        "fates/trained",
        "data/left_out_empty",
        "beta",
        "seconds",
        "response/tokens_per_second",
        "evaluation/sampled",
        "evaluation/sampled/gsm8k",
        "evaluation/solver/sampled",
        "evaluation/hard/prompts",
        "evaluation/hard/pass@4",
        "evaluation/hard/solver/sampled",
    ]
    table = completed({}, keys)
    assert [figure.key for figure in table.values()] == keys
    assert (table["judge/math_mean"], table["tools/steps"].of, table["actor.update/loss"].role) == (
        Figure(Of.REWARD, "mean", "judge", "judge", "math"),
        Of.STAGE,
        "actor",
    )
    assert json.loads(FigureNames(table).packed())["evaluation/hard/pass@4"] == {
        "of": "set",
        "name": "pass@4",
        "part": "hard",
    }
