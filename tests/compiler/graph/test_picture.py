"""Pictures of graphs: well-formed and escaped. Every node has a box, no arrow crosses a box, and every arrow
points downwards.
"""

import re
from itertools import combinations, pairwise
from xml.etree import ElementTree

import networkx as nx
import pytest

from rlflow.author.load import algorithms_folder, load_flow
from rlflow.compiler.graph.draw import html, joint_losses, placed, routed, svg

SHIPPED = sorted(path.stem for path in algorithms_folder().glob("[!_]*.py"))
SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", SHIPPED)
def test_boxes_do_not_overlap_and_arrows_point_down_between_them(name):
    graph = load_flow(name).graph()
    layers = [list(layer) for layer in nx.topological_generations(graph.order)]
    routes = routed(layers, sorted(nx.transitive_reduction(graph.order).edges))
    boxes = placed(graph, layers, list(routes.values()), {})
    assert {node.id for node in graph.nodes} == {i for i in boxes if i >= 0}
    middles = set()  # of layers, twice
    for layer in layers:
        for one, other in combinations([boxes[i] for i in layer], 2):
            assert abs(one.x - other.x) >= (one.width + other.width) / 2 + 1
        edges = [(boxes[i].x - boxes[i].width / 2, boxes[i].x + boxes[i].width / 2) for i in layer]
        middles.add(round(min(left for left, _ in edges) + max(right for _, right in edges), 3))
    assert len(middles) == 1
    for route in routes.values():
        for above, below in pairwise(route):
            assert boxes[below].y > boxes[above].y + boxes[above].height
    tree = ElementTree.fromstring(svg(graph))
    assert len(tree.findall(f".//{SVG}rect")) == len(graph.nodes)
    words = [word for node in graph.nodes for word in (node.name, joint_losses(node)) if word]
    assert sorted(text.text for text in tree.findall(f".//{SVG}text")) == sorted(words)
    width = float(tree.attrib["width"])
    assert all(box.x - box.width / 2 > 0 and box.x + box.width / 2 < width for box in boxes.values())


def test_a_long_arrow_has_a_place_in_each_layer():
    layers = [[0], [1], [2], [3]]
    assert routed(layers, [(0, 1), (0, 3)]) == {(0, 1): [0, 1], (0, 3): [0, -1, -2, 3]}
    assert layers == [[0], [1, -1], [2, -2], [3]]


def test_the_body_of_a_repeat_is_drawn_below():
    page = html(load_flow("dapo").graph())
    assert len(re.findall("<svg", page)) == 2
    assert "repeated by" in page


def test_text_cannot_become_markup():
    graph = load_flow("grpo").graph()
    page = html(
        graph,
        {node.id: "<script>alert(1)</script>" for node in graph.nodes},
        ["</pre><img src=x onerror=alert(1)>"],
    )
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page


def test_settings_shape_the_drawn_graph():
    flow = load_flow("grpo")
    settings = type(flow.parameters.hp)
    names = {beta: {node.name for node in flow.graph(settings(beta=beta)).nodes} for beta in (0.0, 0.1)}
    assert names[0.0] < names[0.1]
    assert flow.graph()._repr_html_() == html(flow.graph())
