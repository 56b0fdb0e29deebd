"""Types read from the text of a file."""

import ast
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from annotated_types import Ge, Lt

from rlflow.author.annotations import annotated


@pytest.mark.parametrize(
    ("text", "type_"),
    [
        ("int", int),
        ("str", str),
        ("Path", Path),
        ("None", type(None)),
        ("int | None", int | None),
        ("Tensor", Any),
        ("Literal['a', 'b']", Literal["a", "b"]),
        ("Literal['a']", Literal["a"]),
        ("list[int]", Any),
        ("Annotated[float, Ge(0), Lt(1)]", Annotated[float, Ge(0), Lt(1)]),
        ("Annotated[int, 'a word']", int),
    ],
)
def test_an_annotation_states_its_type(text, type_):
    assert annotated(ast.parse(text, mode="eval").body) == type_
