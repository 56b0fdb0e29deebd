"""Drawings of a graph for people and for strict programs."""

import json
import re

import pytest

from rlflow.compiler.graph import draw

NOT_JSON = pytest.fail


def test_the_text_has_a_line_for_each_node(repeated):
    lines = draw.text(repeated).splitlines()
    assert lines[0] == "flow repeated(groups=4, limit=inf)"
    assert [line.split()[0] for line in lines[1:]] == [
        "prompts",
        "state",
        "repeat.body",
        "|",
        "|",
        "|",
        "|",
        "|",
        "actor.logprobs",
        "raise_bar",
        "actor.update",
        "state",
    ]
    assert lines[-1] == "  state bar = 0.25, then raise_bar.bar"


def test_printing_a_graph_shows_its_text(ppo):
    assert str(ppo) == draw.text(ppo)


@pytest.mark.parametrize("name", ["ppo", "repeated"])
def test_json_is_valid(name, request):
    graph = request.getfixturevalue(name)
    read = json.loads(draw.as_json(graph), parse_constant=lambda text: NOT_JSON(f"{text} is not JSON"))
    assert [node["name"] for node in read["nodes"]] == [node.name for node in graph.nodes]


def test_non_finite_numbers_become_text_in_json(repeated):
    read = json.loads(draw.as_json(repeated))
    assert read["hp"] == [["groups", 4], ["limit", "inf"]]
    assert read["nodes"][2]["timeout"] == "inf"


@pytest.mark.parametrize("name", ["ppo", "repeated"])
def test_mermaid_has_every_node_and_edges_between_nodes(name, request):
    graph = request.getfixturevalue(name)
    first, *lines = draw.mermaid(graph).splitlines()
    nodes = [
        match
        for line in lines
        if (match := re.fullmatch(r'  n(\d+)(\[\(|\[\[|\[|\{\{)"([^"]+)"(\)\]|\]\]|\]|\}\})', line))
    ]
    edges = [match for line in lines if (match := re.fullmatch(r'  n(\d+) -->\|"[^"|]+"\| n(\d+)', line))]
    assert first == "flowchart TD"
    assert [match[3] for match in nodes] == [node.name for node in graph.nodes]
    assert len(nodes) + len(edges) == len(lines)
    assert {int(number) for match in edges for number in match.groups()} <= {node.id for node in graph.nodes}


@pytest.mark.parametrize("name", ["ppo", "repeated"])
def test_dot_is_a_digraph_of_quoted_labels(name, request):
    graph = request.getfixturevalue(name)
    lines = draw.dot(graph).splitlines()
    assert (lines[0], lines[-1]) == (f'digraph "{graph.name}" {{', "}")
    statement = r'  (node \[shape=box\]|n\d+ \[label="[^"]+"\]|n\d+ -> n\d+ \[label="[^"]+"\]);'
    assert all(re.fullmatch(statement, line) for line in lines[1:-1])


def test_implied_edges_are_not_drawn(ppo):
    assert 'n1 -->|"' in draw.mermaid(ppo)
    assert "n0 -->" in draw.mermaid(ppo)
    assert not re.search(r"n1 -->.* n11", draw.mermaid(ppo)), "actor.update waits for more than the rows"


def test_quotes_in_names_do_not_break_a_drawing():
    assert draw._quoted('a "b" #1') == "a #quot;b#quot; #35;1"
    assert draw._dotted('a "b"\\ ünïcode') == '"a \\"b\\"\\\\ ünïcode"'


def test_settings_cannot_break_the_first_line(graph_of, repeated_text):
    text = repeated_text.replace("groups: int = 4", 'groups: int = 4\n    name: str = "a\\nb\\x1b[0m"')
    assert (
        draw.text(graph_of(text)).splitlines()[0] == "flow repeated(groups=4, name=a\\nb\\x1b[0m, limit=inf)"
    )
