"""An environment's class is read from the text of its file: its needs, its options and its errors, with file
and line."""

from typing import Any, Literal

import pytest

from rlflow.errors import PlanError
from rlflow.rewards.environments.environment_source import REQUIRED, UNKNOWN, class_names, read_class

WHOLE = '''
from typing import Literal
import os
from rlflow import Turn

class Base:
    repeatable = False
    def step(self, said):
        return Turn(reward=1.0)

class Own(Base):
    def __init__(self, *, topk: int = 3, way: Literal["a", "b"] = "a", home=os.getcwd(), key: str):
        pass
    def reset(self, prompt, question, extra=None, *, seed):
        pass
    def helper(self): ...
    async def score(self): return 1.0

class Plain:
    def step(self, said): return Turn(says="x")

class Rest:
    def reset(self, **fields): ...
    def step(self, said): ...

class Tools:
    def search(self, query: str) -> str:
        """Search."""

class Far(Turn): ...
'''


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(WHOLE)
    return str(path)


def test_settings_and_columns_come_from_the_class_and_its_bases(file):
    own = read_class(file, "Own")
    assert {name: (setting.type, setting.default) for name, setting in own.settings.items()} == {
        "topk": (int, 3),
        "way": (Literal["a", "b"], "a"),
        "home": (Any, UNKNOWN),
        "key": (str, REQUIRED),
    }
    assert (own.required, own.optional, own.rest) == (("prompt", "question"), ("extra",), False)
    assert (own.repeatable, own.scores, own.later, own.tools) == (False, True, True, ())
    assert str(own.place).endswith("own.py:11")
    assert own.text == WHOLE


def own_flags(file):
    own = read_class(file, "Own")
    return own.opens, own.ends


def test_a_class_without_rewards_or_async_is_reported(file):
    plain = read_class(file, "Plain")
    assert (plain.repeatable, plain.scores, plain.later, plain.settings) == (True, False, False, {})
    assert (plain.opens, plain.ends, own_flags(file)) == (False, False, (True, True))
    assert read_class(file, "Rest").rest
    assert [tool.name for tool in read_class(file, "Tools").tools] == ["search"]
    assert read_class(file, "Far").tools == ()  # its base may provide the missing method
    assert class_names(file) == ["Base", "Own", "Plain", "Rest", "Tools", "Far"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("class Ow: ...", r"own.py:1: .* does not define a class 'Own'(?s:.*)nearest:  Ow"),
        ("\nclass Own:\n    def run(self): return 1", r"own.py:3: the tool 'run' has no docstring"),
        (
            "\nclass Own:\n    def _run(self): return 1",
            r"own.py:2: the class 'Own' is not an environment: define step\(\) or public methods as tools",
        ),
        (
            "class Own:\n    def step(self, said): ...\n    def reset(self, *columns): ...",
            r"own.py:3: 'reset' has positional-only",
        ),
        (
            "class Own:\n    def step(self, said): ...\n    def __init__(self, a, /): ...",
            r"own.py:3: '__init__' has positional-only",
        ),
        ("class Own(:", r"own.py:1: the environment's file is not valid Python"),
    ],
)
def test_an_invalid_environment_is_reported_at_its_line(tmp_path, monkeypatch, text, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(PlanError, match=says):
        read_class("own.py", "Own")


def test_a_missing_file_is_reported_with_its_neighbours(file):
    with pytest.raises(
        PlanError,
        match=r"no such environment file: .*owm.py(?s:.*)expected: file.py:Class(?s:.*)nearest:  own.py",
    ):
        read_class(file.replace("own", "owm"), "Own")


def test_flags_are_read_by_name_only(tmp_path):
    (tmp_path / "marked.py").write_text(
        "class Marked:\n    other = 1\n    more: int = 1\n    repeatable = False\n    def step(self, said): "
        "...\n\nclass Typed:\n    other = 0\n    more: int = 0\n    def step(self, said): ...\n"
    )
    marked, typed = (read_class(str(tmp_path / "marked.py"), name) for name in ("Marked", "Typed"))
    assert (marked.repeatable, typed.repeatable) == (False, True)
