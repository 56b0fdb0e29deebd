"""Rows of rows: asked, chosen, joined, and merged up; the same eagerly and compiled, with groups and chance that belong to the axis."""

from pathlib import Path

import pytest
import torch

from rlflow.author.load import load
from rlflow.execution.account import Fate
from rlflow.passes import plan
from rlflow.trace.compile import compile_flow

LINEAGE = load(Path(__file__).parent / "lineage.py")
NAMES = ["critique", "correction", "debate", "raft", "marked", "harder"]


@pytest.mark.parametrize("name", NAMES)
def test_eager_and_compiled_learn_from_the_same_rows(world, name):
    eager, compiled = world(getattr(LINEAGE, name)), world(getattr(LINEAGE, name))
    for _ in range(3):
        eager.eager(5)
        outcome = compiled.compiled(5)
        assert outcome.account.closes
        assert not compiled.executor.store.columns
    assert eager.learned
    assert compiled.learned == eager.learned
    assert compiled.stream.position == eager.stream.position


def rows_of(world, flow, count, node):
    """Of one compiled iteration, the batch that a node gave."""
    run, seen = world(flow), {}
    put = type(run.executor.store).put

    def spied(self, of, batch, names):
        seen.setdefault(of.name, batch)
        return put(self, of, batch, names)

    run.executor.store.__class__.put = spied
    try:
        run.compiled(count)
    finally:
        run.executor.store.__class__.put = put
    return seen[node]


def test_asked_rows_make_groups_of_their_own_samples(world):
    second = rows_of(world, LINEAGE.critique, 3, "verifier.generate")
    assert second.axis.groups * 2 == len(second)
    assert second["group"].tolist() == [i // 2 for i in range(len(second))]
    assert len(set(map(tuple, second.axis.keys.tolist()))) == len(second)


def test_groups_of_joined_rows_stay_apart_and_are_numbered_along(world):
    both = rows_of(world, LINEAGE.correction, 3, "concat")
    assert len(both) == 12
    assert both["group"].tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8]


def test_every_sampled_row_has_one_fate_along_its_history(world):
    run = world(LINEAGE.critique)
    account = run.compiled(6).account
    assert account.sampled["solver.generate"].rows == 16
    assert account.sampled["verifier.generate"].rows == 32
    assert account.of(Fate.TRAINED, "solver.update").rows == 16
    assert account.of(Fate.TRAINED, "verifier.update").rows == 32
    account = world(LINEAGE.raft).compiled(3).account
    assert account.of(Fate.TRAINED).rows == 3
    assert {(end.node, end.cause, end.setting): count.rows for (_, end), count in account.ends.items() if end.fate is Fate.LEFT_OUT} == {
        ("choose", "not chosen", "count=1"): 9}
    account = world(LINEAGE.correction).compiled(3).account
    assert account.of(Fate.TRAINED, "actor.update").rows == 12


def test_what_is_not_read_of_joined_rows_is_not_computed():
    made = plan(compile_flow(LINEAGE.correction))
    node = made.graph.by_name["concat"]
    assert "policy_version" not in made.keeps(node)
    assert {"tokens", "advantages"} <= set(made.keeps(node))


def test_a_seed_follows_from_the_place_in_the_lineage(world):
    second = rows_of(world, LINEAGE.debate, 3, "one.generate#2")
    texts = [tuple(row.tolist()) for row in second["tokens"]]
    assert len(set(texts)) > len(texts) // 2
    assert torch.equal(second["tokens"], rows_of(world, LINEAGE.debate, 3, "one.generate#2")["tokens"])
