"""Digests identify the behaviour of a function; places identify the first line of a call."""

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sources import TESTS

from rlflow.author.batch import missing_column
from rlflow.author.load import load, load_flow
from rlflow.author.source_lines import call_place, definition_place, digest
from rlflow.compiler.trace.symbols import SymbolicColumn
from rlflow.errors import FlowError

PLAIN = '''
from dataclasses import dataclass

CAP = 2.0
NAMES = {"b", "a", "c"}

def helper(x, scale=1.0):
    return x * scale

def unused(x):
    return x

@dataclass
class Pair:
    one: int = 1

def stage(x, *, cap=CAP):
    """What it does."""
    # a comment
    return [helper(y) for y in x] if x in NAMES else Pair(min(cap, CAP))
'''


@pytest.fixture
def digest_of(tmp_path):
    made = iter(range(1000))

    def of(text, name="stage"):
        path = tmp_path / f"module_{next(made)}.py"
        path.write_text(text)
        return digest(getattr(load(path), name))

    return of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("    # a comment\n", ""),
        ("# a comment", "# another"),
        ('    """What it does."""\n', ""),
        ("What it does", "What it did"),
        ("def unused(x):\n    return x", "def unused(x):\n    return -x"),
        ("return [helper(y) for y in x]", "return [\n        helper(y)\n        for y in x\n    ]"),
        ("\nCAP", "\n\n\n\nCAP"),
        ('{"b", "a", "c"}', '{"a", "b", "c"}'),
        ("def helper(x, scale=1.0)", "from functools import cache\n\n@cache\ndef helper(x, scale=1.0)"),
    ],
)
def test_changes_of_form_keep_the_digest(digest_of, old, new):
    assert old in PLAIN
    assert digest_of(PLAIN.replace(old, new)) == digest_of(PLAIN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("min(cap, CAP)", "max(cap, CAP)"),  # the body
        ("*, cap=CAP", "*, cap=1.0"),  # a default
        ("CAP = 2.0", "CAP = 3.0"),  # a constant, here also a default
        ("return x * scale", "return x + scale"),  # a helper called only by a comprehension
        ("scale=1.0", "scale=2.0"),  # a helper's default
        ('{"b", "a", "c"}', '{"b", "a"}'),  # a constant that is a set
        ("one: int = 1", "one: int = 2"),  # a class of the file
    ],
)
def test_changes_of_behaviour_change_the_digest(digest_of, old, new):
    assert old in PLAIN
    assert digest_of(PLAIN.replace(old, new)) != digest_of(PLAIN)


def test_a_captured_value_is_part_of_the_digest(digest_of):
    text = "def make(n):\n    def stage(x):\n        return x + n\n    return stage\nstage = make({})\n"
    assert digest_of(text.format(1)) == digest_of(text.format(1))
    assert digest_of(text.format(1)) != digest_of(text.format(2))


def test_a_stage_or_a_cached_helper_counts_as_its_function(digest_of):
    text = (
        "import functools\n@functools.lru_cache\ndef helper(x):\n    return x{}\ndef stage(x):\n    "
        "return helper(x)\n"
    )
    assert digest_of(text.format("")) != digest_of(text.format(" + 1"))


def test_a_mock_like_object_does_not_break_the_digest(digest_of):
    text = (
        "class Any:\n    def __getattr__(self, name):\n        return Any()\nclient = Any()\ndef "
        "stage(x):\n    return client.call(x)\n"
    )
    assert len(digest_of(text)) == 12


def test_mutually_recursive_functions_have_a_digest(digest_of):
    assert (
        len(digest_of("def stage(x):\n    return other(x)\ndef other(x):\n    return stage(x) if x else 0\n"))
        == 12
    )


def test_a_helper_of_a_helper_counts(digest_of):
    text = (
        "def inner(x):\n    return x{}\ndef helper(x):\n    return inner(x)\ndef stage(x):\n    "
        "return (lambda y: helper(y))(x)\n"
    )
    assert digest_of(text.format("")) != digest_of(text.format(" + 1"))


def test_the_digest_is_the_same_in_another_process():
    path = str(TESTS / "compiler" / "check" / "fixtures" / "never_read.py")
    script = (
        "from rlflow.author.load import load_flow as f; "
        f"print(f({path!r}).function.__globals__['difficulty'].digest)"
    )
    runs = [
        subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": str(seed)},
        ).stdout
        for seed in (1, 2)
    ]
    assert runs[0] == runs[1]


# -- places
# ------------------------------------------------------------------------------------------------------------


def test_the_place_is_the_first_line_of_a_call_over_several_lines():
    first = sys._getframe().f_lineno + 1
    problem = missing_column(
        "name",
        {},
    )
    assert (problem.place.path, problem.place.line) == (__file__, first)
    later = [missing_column("first", {}), missing_column("second", {})][1]
    assert later.place.line == sys._getframe().f_lineno - 1


def test_frames_of_torch_are_not_user_frames():
    line = sys._getframe().f_lineno + 2
    with pytest.raises(FlowError) as caught:
        torch.nn.functional.softmax(
            SymbolicColumn("scores"),
            dim=0,
        )
    assert (caught.value.problems[0].place.path, caught.value.problems[0].place.line) == (__file__, line)


def test_frames_of_the_standard_library_are_not_user_frames():
    assert functools.reduce(lambda _, __: call_place().path, [0, 0]) == __file__
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(call_place).result() is None


def test_a_definition_is_placed_at_its_first_decorator():
    place = definition_place(load_flow("ppo").function)
    assert Path(place.path).read_text().splitlines()[place.line - 1] == "@flow"
