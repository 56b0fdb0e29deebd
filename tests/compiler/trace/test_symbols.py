"""Settings of calls that are scalar columns."""

from types import SimpleNamespace

import pytest

from rlflow import flow
from rlflow.author.columns import row, scalar
from rlflow.author.signature import REQUIRED
from rlflow.compiler.check.checker import check
from rlflow.compiler.graph.model import Column, Input, Node, Op
from rlflow.compiler.trace.symbols import ColumnSource, SymbolicColumn, call_settings
from rlflow.errors import FlowError

RECORDED = SimpleNamespace(
    nodes=[
        Node(0, Op.DATA, "prompts", 0),
        Node(1, Op.STAGE, "all", 0, dispatch="ALL"),
        Node(2, Op.STAGE, "one", 0, dispatch="RANK0"),
    ]
)


def column(kind, node=2, recorded=RECORDED):
    return SymbolicColumn("x", ColumnSource(Column(node, "x"), kind), recorded)


def settings(takes=True, **given):
    return call_settings("call", given, {"beta": 0.5, "count": REQUIRED}, lambda name: takes, RECORDED, None)


def test_a_scalar_is_an_edge_without_a_value():
    call = settings(beta=column(scalar("float32")), count=column(scalar("int64")), other=3)
    assert call.edges == (Input("setting.beta", Column(2, "x")), Input("setting.count", Column(2, "x")))
    assert call.without_edges({"beta": 0.5, "count": 1, "other": 3}) == call.values == {"other": 3}
    assert not call.problems


@pytest.mark.parametrize(
    "wrong", [column(row("float32")), column(scalar("bool")), column(None), column(scalar("float32"), node=1)]
)
def test_a_setting_that_is_no_single_number_is_refused(wrong):
    call = settings(beta=wrong, count=wrong)
    assert [problem.code for problem in call.problems] == ["setting-column"] * 2
    assert (call.values, call.edges) == ({"beta": 0.5, "count": 1}, ())


def test_a_setting_that_takes_no_column_is_refused():
    assert "before anything runs" in settings(takes=False, beta=column(scalar("float32"))).problems[0].message


def test_an_absent_column_is_reported_once_by_its_reader():
    call = settings(beta=SymbolicColumn("x", None, RECORDED))
    assert (call.values, call.edges, call.problems) == ({"beta": 0.5}, (), ())


def test_a_column_of_another_trace_is_refused():
    with pytest.raises(FlowError, match="another trace"):
        settings(beta=column(scalar("float32"), recorded=SimpleNamespace()))


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("heat", 'pass batch["heat"] as a setting, or read it inside a @stage'),
        ("scores", "read columns inside a @stage"),
    ],
)
def test_a_missing_attribute_is_not_reported_as_a_missing_column(name, remedy):
    @flow(state=lambda hp: {"heat": 1.0})
    def asking(prompts, actor, reward):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= reward(batch)
        getattr(batch, name)

    (problem,) = check(asking, with_variants=False).problems
    assert (problem.message, problem.remedy) == (
        f"a batch has no attribute '{name}', but it has a column of that name",
        remedy,
    )
