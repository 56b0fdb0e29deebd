"""Suites: cells and settings from the file, and refusals of invalid files with place and remedy."""

import re

import pytest

from rlflow.benchmarks.suite import SHIPPED, find_suite, read_suite
from rlflow.errors import PlanError


def test_every_cell_has_all_combinations_of_the_axes(suite):
    read = suite("""
        [suite]
        seeds = 2
        [base]
        algorithm = "grpo"
        prompts = 8
        actor.lr = 1e-3
        [axis]
        staleness = [0, 1]
        pools = ["", "all=2"]
        [[cell]]
        name = "few"
        hp.samples = 2
        [[cell]]
        hp.samples = 4
        """)
    assert read.seeds == (0, 1)
    assert [cell.name for cell in read.cells] == [
        f"{first} staleness={stale} pools={pools}"
        for first in ("few", "hp.samples=4")
        for stale in (0, 1)
        for pools in ("none", "all=2")
    ]
    assert dict(read.cells[3].flags) == {
        "prompts": 8,
        "actor.lr": 1e-3,
        "hp.samples": 2,
        "staleness": 1,
        "pools": "all=2",
    }


def test_axis_values_override_cell_values_and_base_values(suite):
    read = suite(
        '[base]\nalgorithm = "grpo"\nprompts = 8\n[axis]\nseconds = [3]\n[[cell]]\nprompts = 4\nseconds = 1'
    )
    assert dict(read.cells[0].flags) == {"prompts": 4, "seconds": 3}


def test_the_base_cell_comes_first(suite):
    read = suite('[suite]\nbase = "algorithm=ppo"\n[axis]\nalgorithm = ["grpo", "ppo"]')
    assert [cell.algorithm for cell in read.cells] == ["ppo", "grpo"]


def test_rounds_set_the_iterations_of_a_run(suite):
    assert (
        suite('[suite]\nrounds = 5\nblock = 4\n[base]\nalgorithm = "grpo"').cells[0].flags["iterations"] == 20
    )
    assert (
        suite('[suite]\nrounds = 5\n[base]\nalgorithm = "grpo"\niterations = 7').cells[0].flags["iterations"]
        == 7
    )


def test_repeatable_flags_on_an_axis_have_one_value(suite):
    read = suite('[base]\nalgorithm = "grpo"\n[axis]\nreward = ["math", "task"]')
    assert [cell.flags["reward"] for cell in read.cells] == [("math",), ("task",)]


def test_another_system_gets_its_values_unchanged(suite):
    read = suite('[base]\nsystem = "SYSTEM"\ndata = "a.jsonl"\nreward = "math"\niterations = 3')
    assert dict(read.cells[0].flags) == {"data": "a.jsonl", "reward": "math", "iterations": 3}


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("[sute]\nseeds = 1", r"no table \[sute\]", "nearest:  suite"),
        (
            "[suite]\nseds = 1",
            r"\[suite\] seds cannot be used",
            "expected: one of seeds, block.*\n.*nearest:  seeds",
        ),
        ("[suite]\nseeds = 0", r"\[suite\] seeds cannot be used", "greater than or equal to 1"),
        ("[suite]\nblock = 2\nsettle = 2", "no iteration of a turn is timed", "block = 3"),
        ("[goal]\nmargin = 1.5", r"\[goal\] margin cannot be used", "less than 1"),
        ("cell = 3", "'cell' is not a list of tables", r"\[\[cell\]\]"),
        ("[base]\nprompts = 3", "has no algorithm", r"\[base\]"),
        ('[base]\nalgorithm = "grpo"\nseed = 3', "sets seed", r"\[suite\] seeds"),
        (
            '[base]\nalgorithm = "grpo"\n[axis]\nprompts = 3',
            r"\[axis\] prompts is not a list of values",
            r"\[base\]",
        ),
        (
            '[base]\nalgorithm = "grpo"\n[[cell]]\nname = "a"\n[[cell]]\nname = "a"',
            "two cells have the same name",
            "its own name",
        ),
        (
            '[suite]\nbase = "fewr"\n[[cell]]\nname = "fewer"\nalgorithm = "grpo"',
            "names an unknown cell",
            "nearest:  fewer",
        ),
        (
            '[base]\nalgorithm = "grpo"\n[[gate]]\nmetric = "seconds"\ncell = "grp"',
            "the gate of seconds names an unknown cell",
            "",
        ),
        ("[suite", "is not TOML", "correct the line"),
    ],
)
def test_an_invalid_suite_is_refused_with_a_remedy(suite, text, message, remedy):
    with pytest.raises(PlanError, match=message) as refused:
        suite(text)
    assert re.search(remedy, str(refused.value))


def test_a_missing_suite_shows_the_nearest_name(tmp_path):
    with pytest.raises(PlanError, match="there is no suite 'scedules'") as refused:
        find_suite("scedules")
    assert "nearest:  schedules" in str(refused.value)
    (tmp_path / "mine.toml").touch()
    with pytest.raises(PlanError, match="cannot be read") as refused:
        read_suite(find_suite(str(tmp_path / "mien.toml")))
    assert "nearest:  mine.toml" in str(refused.value)


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.toml")), ids=lambda path: path.stem)
def test_a_shipped_suite_is_found_by_its_name(path):
    assert find_suite(path.stem) == path
    assert len(read_suite(path).cells) > 1
