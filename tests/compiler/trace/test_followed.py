"""Roles that follow another: their nodes in the graph, and mistakes in how they are declared."""

import pytest
import torch

from rlflow import ALL, RANK0, FlowError, flow, follow, loss, row, scalar, stage
from rlflow.author.columns import Level
from rlflow.author.schedule import CallSchedule
from rlflow.compiler.graph.due import due_sets, narrowed
from rlflow.compiler.graph.model import Op
from rlflow.compiler.graph.wire import identity, pack, unpack
from rlflow.compiler.trace.compile import compile_flow


@loss
def likelihood(new, scores, ref_logprobs):
    return (new.logprobs - ref_logprobs) * scores[:, None], {}


@loss
def rewarded(new, scores):
    return -new.logprobs * scores[:, None], {}


@loss(new="values")
def value_loss(new, scores):
    return new.values - scores[:, None], {}


@stage(gives={"stalled": scalar(torch.bool)}, dispatch=RANK0)
def stalls(scores):
    return scores.mean() < 0.5


@stage(gives={"level": scalar("float32")}, dispatch=RANK0)
def levels(scores):
    return scores.mean()


@stage(gives={"each": scalar(torch.bool)}, dispatch=ALL)
def on_each_rank(scores):
    return scores.mean() < 0.5


@stage(gives={"low": row(torch.bool)})
def is_low(scores):
    return scores < 0.5


def following(spec, more=lambda batch, actor, anchor: None, state=None, **others):
    """Return a flow with a reference that follows as ``spec`` says, and with further calls."""

    @flow(keeps=lambda hp: {"anchor": spec, **others}, state=state)
    def followed(prompts, actor, anchor, critic, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= anchor.logprobs(batch, gives="ref_logprobs")
        more(batch, actor, anchor)
        critic.update(batch, value_loss)
        actor.update(batch, likelihood)

    return followed


def graph_of(*arguments, **keywords):
    return compile_flow(following(*arguments, **keywords)).graph


def test_a_follow_is_a_node_after_the_update_and_after_all_reads():
    graph = graph_of(follow("actor", every=3, after=1, mix=0.5))
    node = graph.by_name["anchor.follow"]
    assert (node.op, node.role, node.schedule) == (Op.FOLLOW, "anchor", CallSchedule(3, 1))
    assert dict(node.shown) == {"follows": "actor", "mix": 0.5}
    assert {"actor.update", "anchor.logprobs"} <= graph.before(node.name)
    assert graph.changed_roles == ("actor", "anchor", "critic")
    assert {use.name: use.follows for use in graph.roles}["anchor"] == "actor"
    assert "anchor.follow" in str(graph)
    assert "<- actor, mix=0.5  every=3, after=1" in str(graph)


def test_a_follow_is_part_of_the_identity():
    graphs = [graph_of(follow("actor", every=every, mix=mix)) for every, mix in ((1, 1), (2, 1), (1, 0.5))]
    assert len({identity(graph) for graph in graphs}) == 3
    assert all(unpack(pack(graph)) == graph for graph in graphs)


def test_a_follow_by_a_column_waits_for_it_and_is_idle_without_it():
    graph = graph_of(follow("actor", when="stalled"), lambda batch, *roles: stalls(batch, every=2))
    assert "stalls" in graph.before("anchor.follow")
    idle = [
        {node.name for node in narrowed(graph, each.idle).graph.nodes if node.op is Op.IDLE}
        for each in due_sets(graph)
    ]
    assert idle == [set(), {"stalls", "anchor.follow"}]


def test_a_state_can_decide():
    graph = graph_of(
        follow("actor", when="level"), lambda batch, *roles: levels(batch), lambda hp: {"level": 0}
    )
    (item,) = graph.by_name["anchor.follow"].inputs
    assert graph.nodes[item.column.node].name == "levels"
    assert graph.nodes[item.column.node].output("level").kind.level is Level.SCALAR


def test_a_role_that_is_not_used_does_not_follow():
    @flow(keeps=lambda hp: {"anchor": follow("actor")})
    def without(prompts, actor, anchor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        actor.update(batch, rewarded)

    graph = compile_flow(without).graph
    assert "anchor.follow" not in graph.by_name
    assert graph.changed_roles == ("actor",)


def test_a_role_that_only_the_evaluation_uses_follows():
    def answers(prompts, anchor, reward):
        batch = anchor.generate(prompts, samples=1, max_tokens=4)
        return batch | reward(batch)

    @flow(keeps=lambda hp: {"anchor": follow("actor")}, evaluate=answers)
    def evaluated(prompts, actor, anchor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        actor.update(batch, rewarded)

    assert compile_flow(evaluated).graph.changed_roles == ("actor", "anchor")


MISTAKES = {
    "an unknown role": ("follow-role", follow("acto"), {}),
    "a role that is not updated": ("follow-role", follow("reward"), {}),
    "itself": ("follow-role", follow("anchor"), {}),
    "a chain": ("follow-role", follow("critic"), {"critic": follow("actor")}),
    "an updated role": ("follow-updated", follow("critic"), {"actor": follow("critic")}),
    "another head": ("follow-head", follow("critic"), {}),
    "no such column": ("follow-when", follow("actor", when="stalled"), {}),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_is_reported(what):
    code, spec, others = MISTAKES[what]
    with pytest.raises(FlowError) as raised:
        graph_of(spec, **others)
    problem = next(problem for problem in raised.value.problems if problem.code == code)
    assert problem.place.path == __file__
    assert problem.remedy


@pytest.mark.parametrize(("column", "call"), [("level", levels), ("each", on_each_rank), ("low", is_low)])
def test_a_column_that_decides_is_one_bool(column, call):
    with pytest.raises(FlowError) as raised:
        graph_of(follow("actor", when=column), lambda batch, *roles: call(batch))
    assert "follow-when" in [problem.code for problem in raised.value.problems]


@pytest.mark.parametrize(
    "wrong",
    [
        {"mix": 0},
        {"mix": 1.5},
        {"mix": float("nan")},
        {"every": 0},
        {"every": True},
        {"after": -1},
        {"when": ""},
        {"when": "stalled", "every": 2},
        {"when": "stalled", "after": 2},
        {"role": ""},
    ],
)
def test_a_declaration_with_wrong_values_is_refused(wrong):
    with pytest.raises(FlowError) as raised:
        follow(**({"role": "actor"} | wrong))
    assert raised.value.problems[0].code == "keeps-follow"
