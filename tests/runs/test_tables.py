"""Runs of flows that keep tables across iterations."""

import dataclasses
import json

import pytest
from run_faults import content, differences, in_child, resumed
from sources import TESTS

import rlflow
from rlflow.author.load import load_flow
from rlflow.compiler.check.staleness import stale_problems
from rlflow.compiler.trace.compile import compile_flow

POOLS = "train=2@threads,rollout=2@threads"


FLOW = load_flow(str(TESTS / "runs" / "flows" / "least_visited.py"))


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Data with four prompts, so that each iteration sees all of them."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(4)))
    return path


@pytest.fixture
def run(few, tmp_path):
    def ran(name, **keywords):
        fixed = {"backend": "null", "prompts": 4, "iterations": 6, "held_out": 0, "prove": "off"}
        keywords = {**fixed, **keywords, "data": str(few), "out": str(tmp_path), "name": name}
        assert in_child(lambda: rlflow.run(FLOW, quiet=True, **keywords)) == 0
        return tmp_path / name

    return ran


def visits(folder):
    """Return the mean number of visits that the prompts of each iteration had when they were read."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["gain/visits"] for line in lines if "gain/visits" in line]


def test_an_iteration_reads_what_earlier_ones_wrote(run):
    folder = run("straight")
    assert visits(folder) == [6 * number / 4 for number in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_iterations_ahead_read_exactly_what_they_may(run, staleness):
    """Iteration i reads the writes of all iterations before i - K, whatever the timing."""
    folder = run("ahead", pools=POOLS, staleness=staleness)
    assert visits(folder) == [6 * max(number - staleness, 0) / 4 for number in range(6)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"pools": POOLS, "staleness": 2}])
def test_a_resumed_run_ends_on_the_same_numbers(run, options):
    straight = run("straight", **options)
    cut = run("cut", iterations=3, **options)
    assert resumed(cut, iterations=6) == 0
    assert list(differences(content(cut), content(straight))) == []
    assert any(name.startswith("memory/seen.") for name in content(cut).files)


def test_iterations_ahead_must_be_allowed_to_read_old_numbers():
    strict = dataclasses.replace(FLOW.parameters.hp, reason="")
    (problem,) = stale_problems(compile_flow(FLOW, strict), staleness=1)
    assert problem.code == "staleness-chain"
    assert "what earlier iterations wrote into 'seen'" in problem.message
    assert "stale_ok=" in problem.remedy
    assert list(stale_problems(compile_flow(FLOW), staleness=1)) == []
