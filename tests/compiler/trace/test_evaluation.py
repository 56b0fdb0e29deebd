"""A flow's own evaluation as a graph: its trace, its identity and its errors."""

import pytest
from sources import TESTS

from rlflow import choose, flow, loss, row, stage, text
from rlflow.author.load import load_flow
from rlflow.compiler.check.checker import check
from rlflow.compiler.graph import draw
from rlflow.compiler.graph.diff import diff
from rlflow.compiler.graph.model import used_nodes
from rlflow.compiler.graph.wire import identity, pack, unpack
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import TraceOptions, compile_flow

FLOWS = TESTS / "runs" / "flows" / "judged.py"


def program(name, **options):
    return compile_flow(load_flow(f"{FLOWS}::{name}"), None, TraceOptions(**options))


def test_evaluation_nodes_are_separate_from_iteration_nodes():
    graph = program("two").graph
    assert [node.name for node in graph.evaluation.nodes] == [
        "prompts",
        "evaluation.actor.generate",
        "evaluation.lengths",
        "evaluation.choose",
        "evaluation.again",
        "evaluation.ask",
        "evaluation.actor.generate#2",
        "evaluation.reward",
    ]
    assert graph.nodes == program("usual").graph.nodes
    assert {item.parameter for item in graph.evaluation.results} == {"scores", "completion"}
    assert [node.name for node in used_nodes(graph)] == [
        *(node.name for node in graph.nodes),
        *(n.name for n in graph.evaluation.nodes),
    ]


def test_an_evaluation_is_part_of_the_identity():
    greedy, two, usual = (program(name).graph for name in ("greedy", "two", "usual"))
    assert len({identity(graph) for graph in (greedy, two, usual)}) == 3
    assert unpack(pack(two)) == two
    assert b"evaluation" not in pack(usual)
    assert [str(line) for line in diff(usual, two) if "evaluation" in str(line)] == [
        "+ evaluation last_of_two"
    ]
    assert [str(line) for line in diff(two, usual) if "evaluation" in str(line)] == [
        "- evaluation last_of_two"
    ]
    assert any(
        str(line).startswith("~ in the evaluation: - evaluation.lengths") for line in diff(two, greedy)
    )
    assert not diff(two, program("two").graph)


def test_an_evaluation_is_drawn():
    graph = program("greedy").graph
    lines = draw.text(graph).splitlines()
    assert lines[lines.index("  evaluation greedily") + 1].startswith("  | prompts")
    mermaid = draw.mermaid(graph).splitlines()
    inside = mermaid[
        mermaid.index('  subgraph evaluation["evaluation greedily"]') + 1 : mermaid.index("  end")
    ]
    assert inside[:3] == [
        '  e0[("prompts")]',
        '  e1["evaluation.actor.generate"]',
        '  e2["evaluation.reward"]',
    ]
    assert '  e0 -->|"prompt_tokens"| e1' in inside
    dot = draw.dot(graph).splitlines()
    assert dot[dot.index("  subgraph cluster_evaluation {") + 1] == '  label="evaluation greedily";'
    assert dot[-2:] == ["  }", "}"]


def test_a_plan_runs_only_the_nodes_that_the_evaluation_needs():
    planned = plan(program("two"))
    assert planned.evaluation is not None
    assert plan(program("usual")).evaluation is None
    unread = {"sampled_logprobs", "policy_version", "temperature", "group"}
    assert not {column.name for column in planned.evaluation.columns} & unread


def test_the_run_sets_evaluation_sampling_except_temperatures():
    sampling = {"actor.generate": {"stop": ("x",), "top_p": 0.5, "temperature": 0.3}}
    settings = [
        node.settings
        for node in program("two", sampling=sampling).graph.evaluation.nodes
        if node.role == "actor"
    ]
    assert [(one.stop, one.top_p, one.temperature) for one in settings] == [
        (("x",), 0.5, 1.0),
        (("x",), 0.5, 0.7),
    ]


def test_earlier_calls_of_a_flow_keep_the_seeds_of_its_evaluation():
    graph = program("two").graph
    assert [node.call for node in graph.evaluation.nodes[1:]] == list(range(len(graph.evaluation.nodes) - 1))


@stage(gives={"steady": row("bool")})
def steady(scores):
    return scores > 0


def chosen(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    return choose(batch | steady(batch), "steady")


def test_a_role_used_only_by_the_evaluation_is_a_role_of_the_run():
    @loss
    def likelihood(new):
        return -new.logprobs, {}

    @flow(evaluate=chosen)
    def imitated(prompts, actor, reward):
        actor.update(actor.generate(prompts, max_tokens=4), likelihood)

    assert next(use for use in compile_flow(imitated).graph.roles if use.name == "reward").rewards
    assert not any(problem.code == "role-unused" for problem in check(imitated).problems)


def test_sampling_in_an_evaluation_is_not_trained_on():
    def judged(prompts, actor, reward):
        batch = actor.generate(prompts, max_tokens=4)
        return batch | reward(batch)

    @loss
    def likelihood(new):
        return -new.logprobs, {}

    @flow(evaluate=judged, data={"completion": text})
    def learned(examples, actor, reward):
        actor.update(examples, likelihood)

    graph = compile_flow(learned).graph
    assert not next(use for use in graph.roles if use.name == "actor").generates
    assert {output.name for output in graph.evaluation.nodes[0].outputs} == {
        "prompt",
        "answer",
        "prompt_tokens",
    }
    assert check(learned, staleness=1).ok


@pytest.mark.parametrize(("result", "found"), [(None, "NoneType"), (1.0, "float")])
def test_an_evaluation_without_a_batch_is_refused_by_name(result, found):
    def judged(prompts, actor, reward):
        actor.generate(prompts, max_tokens=4)
        return result

    @loss
    def likelihood(new):
        return -new.logprobs, {}

    @flow(evaluate=judged)
    def learned(prompts, actor, reward):
        actor.update(actor.generate(prompts, max_tokens=4), likelihood)

    [problem] = [problem for problem in check(learned).problems if problem.severity == "error"]
    assert (problem.code, problem.found) == ("evaluate-result", found)
    assert "'judged' does not return a batch" in problem.message
