"""A flow as a value: its name and its graph."""

import pytest

from rlflow.author.load import load_flow
from rlflow.compiler.graph.model import Op


@pytest.fixture(scope="module")
def grpo():
    return load_flow("grpo")


def samples(graph):
    return [node.settings.samples for node in graph.nodes if node.op is Op.GENERATE]


def test_a_flow_has_the_name_and_docstring_of_its_function(grpo):
    assert (grpo.name, grpo.__name__, grpo.__doc__) == ("grpo", "grpo", grpo.function.__doc__)


def test_the_graph_uses_the_passed_settings_or_the_defaults(grpo):
    own = grpo.parameters.hp
    assert samples(grpo.graph()) == samples(grpo.graph(own)) == [own.samples]
    assert samples(grpo.graph(type(own)(samples=own.samples + 3))) == [own.samples + 3]
