"""The parts of a reward's file that are read without executing it."""

import pytest

from rlflow.errors import PlanError
from rlflow.rewards.text import functions


@pytest.mark.parametrize(
    ("text", "line"), [("def f(:\n    pass\n", 1), ("x = 1\n\ndef f(:\n    pass\n", 3), ("x = 'a\0b'\n", 1)]
)
def test_a_file_that_is_not_python_is_named_with_a_line(tmp_path, text, line):
    path = tmp_path / "judge.py"
    path.write_text(text)
    with pytest.raises(PlanError) as refused:
        functions(str(path))
    [problem] = refused.value.problems
    assert (problem.code, str(problem.place)) == ("reward-syntax", f"{path}:{line}")


def test_functions_are_the_names_bound_by_the_module(tmp_path):
    path = tmp_path / "judge.py"
    path.write_text(
        "if True:\n    def a(): ...\nelse:\n    def b(): ...\ntry:\n    async def c(): ...\nexcept E:\n  "
        "  pass\nelse:\n"
        "    def d(): ...\n\nclass K:\n    def method(self): ...\n\ndef e():\n    def inner(): ...\n"
    )
    assert functions(str(path)) == ["a", "b", "c", "d", "e"]
