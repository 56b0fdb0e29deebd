"""A run that remembers in every way, on two pools with iterations ahead, ends on the same bits after any kill."""

import itertools
import json
import os
import random
import signal

import pytest
from run_faults import at_each, content, differences, in_child, resumed
from sources import TESTS

import rlflow
from rlflow.author.load import load_flow
from rlflow.runs.outcomes import run_account

FLOW = load_flow(str(TESTS / "runs" / "flows" / "remembering.py"))
POOLS = "train=2@threads,rollout=1@threads"
NODES = 110  # nodes that begin before the last iteration


@pytest.fixture
def run(tmp_path):
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(7)))

    def ran(name, dies_at=None, **keywords):
        """Run the flow, and kill the run when ``dies_at`` nodes have begun."""
        begun = itertools.count(1)

        def begins(node, iteration):
            if next(begun) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        def action():
            at_each(begins)
            rlflow.run(FLOW, data=str(data), out=str(tmp_path), name=name, quiet=True, **keywords)

        fixed = {"prompts": 5, "iterations": 8, "held_out": 0, "prove": "off", "save_every": 1}
        keywords = {"backend": "null", **fixed, **keywords}
        assert in_child(action) == (0 if dies_at is None else -signal.SIGKILL)
        return tmp_path / name

    return ran


def compared(run, kills):
    options = {"pools": POOLS, "staleness": 1}
    straight, continued = run("straight", **options), 0
    for number in kills:
        cut = run(f"cut-{number}", dies_at=number, **options)
        if not list(cut.glob("checkpoints/step-*")):  # none was written in time
            continue
        assert resumed(cut) == 0
        continued += 1
        assert list(differences(content(cut), content(straight))) == []
        assert run_account(cut) == run_account(straight)
    assert continued > 0
    assert run_account(straight).closes
    assert {name.partition(".")[0] for name in content(straight).files if name.startswith("memory/")} == {
        "memory/seen",
        "memory/past",
    }


@pytest.mark.slow
def test_a_killed_run_ends_on_the_same_bits(run):
    compared(run, [NODES])


@pytest.mark.long
def test_a_run_killed_at_any_node_ends_on_the_same_bits(run):
    compared(run, random.Random(0).sample(range(50, NODES), 10))


@pytest.mark.slow
def test_other_ranks_remember_the_same(run):
    """What is kept is equal bit for bit. On several ranks, the loss is summed in another order."""
    one, two = run("one"), run("two", pools="all=2@threads")
    kept = [
        {name: data for name, data in content(each).files.items() if "memory/seen" in name}
        for each in (one, two)
    ]
    assert kept[0] == kept[1]
    assert run_account(one) == run_account(two)
