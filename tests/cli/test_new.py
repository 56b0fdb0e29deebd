"""`rlflow new`: a copy of a shipped algorithm under a new name."""

from pathlib import Path

import pytest

from rlflow import PlanError, algorithms
from rlflow.author.load import load_flow
from rlflow.cli.check import check_file
from rlflow.cli.new import write_new
from rlflow.compiler.graph.diff import diff
from rlflow.compiler.trace.compile import compile_flow

SHIPPED = sorted(path.stem for path in Path(algorithms.__path__[0]).glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", SHIPPED)
def test_a_copy_has_the_graph_of_its_source_under_its_own_name(tmp_path, name):
    assert write_new(tmp_path / "my_own", name) == 0
    original, copy = load_flow(name), load_flow(str(tmp_path / "my_own.py"))
    assert copy.name == "my_own"
    assert diff(compile_flow(original).graph, compile_flow(copy).graph) == []
    assert original.parameters.hp is None or type(copy.parameters.hp).__name__ == "MyOwn"


def test_a_copy_keeps_its_docstring_and_passes_check(tmp_path):
    write_new(tmp_path / "mine.py", "grpo")
    text = (tmp_path / "mine.py").read_text()
    assert text.startswith('"""Group Relative Policy Optimization, GRPO (Shao et al. 2024)')
    assert "def mine(prompts, actor, reference, reward, hp=Mine()):" in text
    assert check_file(str(tmp_path / "mine.py"), []) == 0


def test_an_unknown_algorithm_is_refused_with_the_nearest(tmp_path):
    with pytest.raises(PlanError, match="rlflow ships no algorithm 'grppo'") as error:
        write_new(tmp_path / "mine", "grppo")
    assert error.value.problems[0].nearest == "grpo"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["compare", "policy_loss", "clip"])
def test_a_name_already_used_in_the_file_is_refused(tmp_path, name):
    with pytest.raises(PlanError, match=f"already uses the name '{name}'"):
        write_new(tmp_path / name, "grpo")


def test_no_file_is_overwritten(tmp_path):
    (tmp_path / "mine.py").write_text("kept")
    with pytest.raises(PlanError, match="exists"):
        write_new(tmp_path / "mine", "grpo")
    assert (tmp_path / "mine.py").read_text() == "kept"
