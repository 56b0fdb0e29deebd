"""Orders derived from a graph: columns, weights, paths."""

import networkx as nx
import pytest

from rlflow import choose, concat, flow, loss, row, stage
from rlflow.compiler.graph.model import Graph, Node, Op, weight_order
from rlflow.compiler.trace.compile import compile_flow


@loss
def policy_loss(new, logprobs):
    return logprobs - new.logprobs, {}


def concurrent(graph, one, other):
    return one not in graph.before(other) and other not in graph.before(one)


def test_rewards_and_forwards_of_ppo_run_concurrently(ppo):
    passes = ["reward", "reference.logprobs", "actor.logprobs", "critic.values"]
    assert all(concurrent(ppo, one, other) for one in passes for other in passes if one != other)


def test_updates_of_two_models_run_concurrently(ppo):
    assert concurrent(ppo, "actor.update", "critic.update")


def test_a_model_is_read_before_it_is_written():
    @flow
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        actor.logprobs(batch, gives="ref_logprobs")  # no stage reads it, but it still comes first
        actor.update(batch, policy_loss)

    assert "actor.logprobs#2" in compile_flow(f).graph.before("actor.update")


def test_updates_of_one_model_keep_program_order_before_later_sampling():
    @flow
    def f(prompts, actor):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)
        actor.update(batch, policy_loss)
        second = actor.generate(prompts, max_tokens=4)
        second |= actor.logprobs(second)
        actor.update(second, policy_loss)

    graph = compile_flow(f).graph
    assert "actor.update" in graph.before("actor.update#2")
    assert "actor.update#2" in graph.before("actor.generate#2")
    assert nx.dag_longest_path_length(graph.order) == 7


def test_joined_rows_wait_for_every_part():
    @flow
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        # the chosen rows keep the columns of the rows that they were chosen from
        best = choose(batch, top="scores", count=1, per="group")
        both = concat(batch, best)
        both |= actor.logprobs(both)
        actor.update(both, policy_loss)

    assert "choose" in compile_flow(f).graph.before("concat")


def node(number, op, role, **fields):
    return Node(number, op, f"{op}{number}", 0, role=role, **fields)


@pytest.mark.parametrize(
    ("nodes", "order"),
    [
        ("RR", set()),
        ("RW", {(0, 1)}),
        ("WR", {(0, 1)}),
        ("WW", {(0, 1)}),
        ("RRW", {(0, 2), (1, 2)}),
        ("WRRW", {(0, 1), (0, 2), (0, 3), (1, 3), (2, 3)}),
    ],
)
def test_reads_stay_between_the_writes_around_them(nodes, order):
    made = tuple(
        node(i, Op.UPDATE if letter == "W" else Op.LOGPROBS, "actor") for i, letter in enumerate(nodes)
    )
    assert {(a, b) for a, b, _ in weight_order(made)} == order


def test_a_stage_with_side_effects_on_a_role_writes_it():
    assert node(0, Op.STAGE, "actor", pure=False).writes == {"actor"}
    assert node(0, Op.STAGE, "actor").writes == frozenset()


def test_an_iteration_changes_trained_roles_and_those_of_side_effects():
    @stage(on="reference", pure=False)
    def moved(reference, scores):
        return {}

    @stage(on="critic")
    def measured(critic, scores):
        return {}

    @flow
    def f(prompts, actor, reference, critic, reward):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= reward(batch)
        moved(batch)
        measured(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    graph = compile_flow(f).graph
    assert graph.changed_roles == ("actor", "reference")
    assert [node.name for node in graph.nodes if node.impure_stage] == ["moved"]


def test_only_stages_with_side_effects_keep_program_order():
    @stage(pure=False)
    def noted(scores):
        return {}

    @stage
    def seen(scores):
        return {}

    @flow
    def f(prompts, actor, reward):
        batch = actor.generate(prompts, max_tokens=4)
        batch |= reward(batch)
        noted(batch)
        seen(batch)
        noted(batch)
        batch |= actor.logprobs(batch)
        actor.update(batch, policy_loss)

    graph = compile_flow(f).graph
    assert "noted" in graph.before("noted#2")
    assert concurrent(graph, "seen", "noted#2")
    assert graph.carried(graph.by_name["noted"].id, graph.by_name["noted#2"].id) == "side effects"


def test_a_repeat_has_the_side_effects_of_its_body():
    inner = node(1, Op.STAGE, None, pure=False)
    assert (
        node(0, Op.REPEAT, None, body=Graph("body", (node(0, Op.STAGE, None), inner), ())).impure_stage
        is inner
    )


def test_a_repeat_reads_the_columns_that_its_body_reads(repeated):
    body = repeated.by_name["repeat.body"]
    assert body.reads == {"actor", "reward"}
    assert "repeat.body" in repeated.before("actor.update")


def test_the_longest_path_of_ppo_goes_through_its_stages(ppo):
    path = [ppo.nodes[i].name for i in nx.dag_longest_path(ppo.order, weight="")]
    assert path[:2] == ["prompts", "actor.generate"]
    assert path[-4:-1] == ["charge_kl", "gae", "normalise"]
    assert path[-1].endswith(".update")
    assert len(path) == 7


def test_the_order_has_no_cycle_and_follows_the_program(ppo, repeated):
    for graph in (ppo, repeated):
        assert all(before < after for before, after in graph.order.edges)


def test_a_node_knows_its_outputs(ppo):
    assert str(ppo.by_name["gae"].output("returns").kind) == "token float32"


@stage(gives={"good": row("bool")})
def good(scores):
    return scores > 0.5


@loss
def likelihood(new):
    return -new.logprobs, {}


def test_an_update_waits_for_an_earlier_choice_that_may_skip_the_iteration():
    """Otherwise, timing would decide whether an iteration in which no row is chosen still trains."""

    @flow
    def apart(prompts, actor, judge, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        some = choose(batch | good(batch), "good")
        actor.update(batch, likelihood)
        judge.update(some, likelihood)

    graph = compile_flow(apart).graph
    assert "choose" in graph.before("actor.update")
    assert "actor.update" not in graph.before("choose")
