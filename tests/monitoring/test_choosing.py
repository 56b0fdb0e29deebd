"""`rlflow runs`: the listed runs, their order and their settings."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlflow.monitoring.choosing import SIGNS, ListedRun, chosen, condition, listed_run
from rlflow.monitoring.history import RunSummary, summarised
from rlflow.monitoring.tables import runs


def names_of(out):
    return [line.split()[0] for line in out.splitlines()[1:]]


@pytest.fixture
def three(written):
    """Three runs that differ in a setting, in their state and in their results; the last has no
    evaluation."""
    written("small", hp={"samples": 4}, rewards=(0.9,), evaluations=((1, 0.5),))
    written("large", hp={"samples": 16}, rewards=(0.2, 0.4), evaluations=((2, 0.875),), state="failed")
    written("middle", hp={"samples": 8}, rewards=(0.6,))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["--sort", "hp.samples"], ["small", "middle", "large"]),
        (["--sort", "eval/sampled"], ["middle", "small", "large"]),  # the run without the value first
        (["--sort", "reward/mean"], ["large", "middle", "small"]),
        (["--sort", "run"], ["large", "middle", "small"]),
        (["--where", "hp.samples=8"], ["middle"]),
        (["--where", "hp.samples!=8", "--sort", "run"], ["large", "small"]),
        (["--where", "state=failed"], ["large"]),
        (["--where", "eval/sampled>0.8"], ["large"]),
        (["--where", "evaluation/sampled<=0.5"], ["small"]),
        (["--where", "hp.samples>4", "--where", "state=done"], ["middle"]),
        (["--where", "actor.lr=0.0001", "--where", "hp.samples<8"], ["small"]),  # recorded as 1e-4
    ],
)
def test_runs_are_sorted_and_filtered_by_settings_states_and_numbers(called, three, words, names):
    code, out, err = called("runs", *words)
    assert (code, err) == (0, "")
    assert names_of(out) == names


def test_only_settings_that_differ_are_columns(called, three):
    head, *lines = called("runs", "--sort", "hp.samples")[1].splitlines()
    assert head.split() == [
        "run",
        "flow",
        "state",
        "iteration",
        "accuracy",
        "reward",
        "age",
        "hp.samples",
        "iterations",
    ]
    assert [line.split()[-2:] for line in lines] == [["4", "1"], ["8", "1"], ["16", "2"]]


def test_several_rewards_are_listed_each_with_its_role(called, written, judged):
    judged("both", 0.25, rewards=(0.5,))
    written("one", rewards=(0.75,))
    both, one = called("runs", "--sort", "run")[1].splitlines()[1:]
    assert both.split()[4:8] == ["reward", "0.500,", "style", "0.250"]
    assert one.split()[4] == "0.750"


def test_a_requested_name_is_a_column(called, three):
    lines = called("runs", "--sort", "own/number", "--where", "hp.samples>4")[1].splitlines()
    assert lines[0].split()[-1] == "own/number"
    assert [line.split()[-1] for line in lines[1:]] == ["0", "10"]


def test_settings_that_do_not_fit_are_named_below(called, written):
    written("one", **{f"option_{i}": 0 for i in range(9)})
    written("two", **{f"option_{i}": 1 for i in range(9)})
    out = called("runs")[1]
    assert "other settings that differ: option_6, option_7, option_8" in out
    assert max(map(len, out.splitlines())) <= 160


def test_a_narrow_terminal_has_fewer_settings_as_columns(written):
    summaries = [summarised(written(name, lr=value, beta=value)) for name, value in (("one", 0), ("two", 1))]
    table, below = runs([listed_run(summary) for summary in summaries], 0.0, width=80)
    assert [str(column.header) for column in table.columns][-2:] == ["age", "lr"]
    assert below.plain == "other settings that differ: beta"


def test_json_has_the_chosen_runs_with_their_settings_and_numbers(called, three):
    [run] = json.loads(called("runs", "--where", "state=failed", "--json")[1])
    assert (run["folder"].endswith("runs/large"), run["iteration"], run["settings"]["hp.samples"]) == (
        True,
        2,
        16,
    )
    assert (run["metrics"]["reward/mean"], run["evaluation"]["evaluation/sampled"]) == (0.4, 0.875)
    assert json.loads(called("runs", "--where", "state=running", "--json")[1]) == []


def test_no_matching_run_is_no_error(called, three):
    assert called("runs", "--where", "hp.samples=5")[:2] == (
        0,
        "none of the 3 runs in runs meets the conditions\n",
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--where", "hp.samples"], ["'hp.samples' is not a condition", "NAME=VALUE"]),
        (["--where", "state>done"], ["does not compare with a number"]),
        (["--where", "hp.sample=8"], ["no run in this folder has 'hp.sample'", "nearest:  hp.samples"]),
        (["--sort", "reward/meen"], ["no run in this folder has 'reward/meen'", "nearest:  reward/mean"]),
    ],
)
def test_a_meaningless_condition_or_name_is_refused(called, three, words, says):
    code, out, err = called("runs", *words)
    assert (code, out) == (2, "")
    assert [part for part in says if part not in err] == []


@given(st.sampled_from(sorted(SIGNS)), st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
def test_numbers_recorded_as_text_are_compared_as_numbers(sign, recorded, wanted):
    for value in (recorded, repr(recorded)):
        run = ListedRun(RunSummary(None, "done"), {}, {"x": value})
        assert bool(chosen([run], [condition(f"x{sign}{wanted!r}")], "x")) == SIGNS[sign](recorded, wanted)
