"""Runs of flows of random shapes, whose rows are generated from follow-up prompts, selected, joined and
merged. On two ranks, with nodes that start late, or killed at any node, they equal the undisturbed run in one
process."""

import os
import random
import signal
import time
from functools import partial

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from run_faults import at_each, content, differences, in_child, metrics, resumed
from sources import TESTS

import rlflow
from rlflow.author.load import load

DRAWN = TESTS / "execution" / "generated.py"
ITERATIONS = 2


def started(out, name, shape, **changes):
    """Start a run of a flow of this shape, from a file of its own."""
    path = out / "shape.py"
    path.write_text(f"{DRAWN.read_text()}\n\ngenerated = drawn(**{shape!r})\n")
    keywords = {
        "backend": "null",
        "prompts": 3,
        "iterations": ITERATIONS,
        "save_every": 1,
        "held_out": 0,
        "prove": "off",
        "quiet": True,
    }
    rlflow.run(f"{path}::generated", **{**keywords, **changes}, out=str(out), name=name)


def late(seed, dies_at=None):
    """Have each node of this process begin up to 20 ms late, and kill the process when `dies_at` nodes have
    begun."""
    drawn, begun = random.Random(seed), []

    def begins(name, iteration):
        begun.append(time.sleep(drawn.choice([0.0, 0.02])))
        if len(begun) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    at_each(begins)


def outcomes(folder):
    return (folder / "fates.jsonl").read_text()


def checked(out, shape, seed):
    """Compare the run with late nodes, on two ranks and killed, with the undisturbed run."""
    assert in_child(partial(started, out, "straight", shape)) == 0
    wanted = content(out / "straight")

    def again(name, dies_at=None, **changes):
        late(seed, dies_at)
        started(out, name, shape, **changes)

    assert in_child(partial(again, "ranks", pools="all=2@threads")) == 0
    # two ranks add up a loss in another order
    assert metrics(out / "ranks") == [pytest.approx(line, rel=1e-12) for line in wanted.metrics]
    assert outcomes(out / "ranks") == outcomes(out / "straight")
    # nodes run concurrently, so it can die later or not at all
    ended = in_child(partial(again, "killed", dies_at=1 + seed % 40))
    assert ended in (0, -signal.SIGKILL)
    if not list((out / "killed").glob("checkpoints/step-*")):
        return
    if ended:
        assert resumed(out / "killed") == 0
    assert list(differences(content(out / "killed"), wanted)) == []
    assert outcomes(out / "killed") == outcomes(out / "straight")


def drawn_runs(examples):
    def decorated(test):
        given_shapes = given(shape=st.fixed_dictionaries(load(DRAWN).SHAPES), seed=st.integers(0, 10_000))
        return settings(max_examples=examples, phases=[Phase.generate])(given_shapes(test))

    return decorated


@pytest.mark.slow
@drawn_runs(2)
def test_a_run_of_any_flow_is_equal_on_ranks_and_after_a_kill(tmp_path_factory, shape, seed):
    checked(tmp_path_factory.mktemp("runs"), shape, seed)


@pytest.mark.long
@drawn_runs(40)
def test_runs_of_many_flows_are_equal_on_ranks_and_after_a_kill(tmp_path_factory, shape, seed):
    checked(tmp_path_factory.mktemp("runs"), shape, seed)
