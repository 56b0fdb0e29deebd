"""Tools become JSON schemas; tools that no schema can describe are refused at their line."""

import ast

import pytest

from rlflow.errors import PlanError
from rlflow.rewards.environments.tool_schema import tool_of


def tool(text):
    return tool_of(ast.parse(text).body[0], "own.py")


def test_a_typed_and_documented_method_is_a_tool():
    made = tool('''
def search(self, query: str, topk: int = 3, *, exact: bool, tags: list[str], kind: Literal["a", "b"] = "a", more: float | None = None):
    """Search the corpus
    for a query.

    Args:
        query: what to look for
        topk (int): how many passages
    """
''')
    parameters = made.schema["function"]["parameters"]
    assert made.schema["function"] | {"parameters": None} == {
        "name": "search",
        "description": "Search the corpus for a query.",
        "parameters": None,
    }
    assert made.parameters == {
        "query": {"type": "string", "description": "what to look for"},
        "topk": {"type": "integer", "description": "how many passages"},
        "exact": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "b"], "type": "string"},
        "more": {"type": "number", "nullable": True},
    }
    assert made.required == ("query", "exact", "tags")
    assert parameters["type"] == "object"
    assert made.schema["type"] == "function"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("def a(self, q: str): ...", "own.py:1: the tool 'a' has no docstring"),
        (
            'def a(self,\n      q):\n    "Says."',
            "own.py:2: the parameter 'q' of the tool 'a' does not have a type that JSON supports",
        ),
        ('def a(self, q: set):\n    "Says."', "found:    set"),
        ('def a(self, q: list[set]):\n    "Says."', r"found:    list\[set\]"),
    ],
)
def test_a_tool_without_a_schema_is_refused(text, says):
    with pytest.raises(PlanError, match=says):
        tool(text)
