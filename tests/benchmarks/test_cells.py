"""Keys of cells: everything that can change a result changes the key, and computing it starts nothing."""

from dataclasses import replace
from functools import cache

import pytest
from sources import ROOT

from rlflow.benchmarks import cells
from rlflow.benchmarks.cells import backends_of, compile_cell, compile_cells, digest_of, files_of, named_paths
from rlflow.benchmarks.suite import Cell, Settings
from rlflow.cli.plan import options_of
from rlflow.errors import PlanError

GRPO = ROOT / "algorithms" / "grpo.py"
NULL = {"backend": "null", "prompts": 4, "iterations": 2, "held_out": 0}


def key(**flags):
    return compile_cell(Cell("one", "rlflow", "grpo", {**NULL, **flags}), options_of).key


@cache
def base_key():
    """The key of the unchanged cell."""
    return key()


def test_the_key_ignores_name_and_flag_order():
    other = compile_cell(Cell("other", "rlflow", "grpo", dict(reversed(NULL.items()))), options_of)
    assert other.key == base_key()
    assert other.iterations == 2


@pytest.mark.parametrize(
    "flags",
    [{"prompts": 5}, {"hp.samples": 3}, {"pools": "all=1"}, {"seed": 3}, {"actor.token_seconds": 0.1}],
)
def test_a_changed_setting_changes_the_key(flags):
    assert key(**flags) != base_key()


def test_versions_machine_threads_and_code_change_the_key(monkeypatch):
    keys = {base_key()}
    for name in ("versions", "machine", "threads", "code_digest"):
        with monkeypatch.context() as changed:
            changed.setattr(cells, name, lambda: {"another": "one"})
            keys.add(key())
    assert len(keys) == 5


def test_a_changed_algorithm_changes_the_key(tmp_path):
    file = tmp_path / "mine.py"
    text = GRPO.read_text()
    file.write_text(text)
    before = compile_cell(Cell("mine", "rlflow", str(file), NULL), options_of).key
    file.write_text(f"{text}\n# a comment\n")
    assert compile_cell(Cell("mine", "rlflow", str(file), NULL), options_of).key != before


def test_named_files_count_by_their_bytes(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "weights").write_bytes(b"1")
    (tmp_path / "judge.py").write_text("def score(completion): return 1.0")
    flags = {
        "model": str(tmp_path / "model"),
        "reward": (f"{tmp_path}/judge.py:score", "math"),
        "data": "nowhere.jsonl",
    }
    assert [name for name, _ in named_paths(flags)] == ["model 0", "reward 0"]
    before = digest_of(tmp_path / "model")
    (tmp_path / "model" / "weights").write_bytes(b"2")
    assert digest_of(tmp_path / "model") != before


@pytest.mark.parametrize("form", ["{}", "math={}", "{}:0.7", "math={}:0.3"])
def test_files_count_in_every_form_of_a_flag(tmp_path, form):
    (tmp_path / "data.jsonl").write_text("{}")
    assert list(named_paths({"data": (form.format(tmp_path / "data.jsonl"),)})) == [
        ("data 0", tmp_path / "data.jsonl")
    ]
    assert not list(named_paths({"prompt": "x" * 5000, "reward": "math", "pools": "train=1,rollout=1"}))


def test_imports_from_the_files_folder_count(tmp_path):
    (tmp_path / "judge.py").write_text("import torch\nfrom helper import score")
    (tmp_path / "helper.py").write_text("def score(completion): return 1.0")
    before = files_of({"reward": f"{tmp_path}/judge.py:score"})
    assert "torch" in before["modules"]
    (tmp_path / "helper.py").write_text("def score(completion): return 0.0")
    assert files_of({"reward": f"{tmp_path}/judge.py:score"})["files"] != before["files"]


def test_a_users_backend_counts_by_its_files():
    assert backends_of({"actor.generator": "rlflow.backends.null", "backend": "local", "model": "a.b"}) == [
        "rlflow.backends.null"
    ]
    assert any(
        name.startswith("rlflow.backends.null: ")
        for name in files_of({"actor.generator": "rlflow.backends.null"})["files"]
    )


@pytest.mark.parametrize("changed", [{"block": 5}, {"settle": 2}, {"rounds": 9}])
def test_the_timed_iterations_change_the_key(changed):
    assert (
        compile_cell(Cell("one", "rlflow", "grpo", NULL), options_of, Settings(**changed)).key != base_key()
    )


def test_all_invalid_cells_are_named_before_the_start(suite):
    read = suite(
        '[base]\nalgorithm = "grpo"\nbackend = "null"\n[[cell]]\nname = "bad"\nhp.sampels = '
        '3\n[[cell]]\nname = "good"\n[[cell]]\nname = "worse"\npools = "all=x"'
    )
    with pytest.raises(PlanError) as refused:
        compile_cells(read, options_of)
    assert [problem.message.split(":")[0] for problem in refused.value.problems] == [
        "cell 'bad'",
        "cell 'worse'",
    ]
    assert refused.value.problems[0].nearest == "--hp.samples"


def test_equal_cells_are_refused(suite):
    read = suite('[base]\nalgorithm = "grpo"\nbackend = "null"\n[[cell]]\nname = "a"\n[[cell]]\nname = "b"')
    with pytest.raises(PlanError, match="several cells have the same settings") as refused:
        compile_cells(read, options_of)
    assert refused.value.problems[0].found == "a, b"


def test_an_unknown_system_shows_the_nearest_name():
    with pytest.raises(PlanError, match="there is no system 'tlr'") as refused:
        compile_cell(replace(Cell("one", "tlr", "", {})), options_of)
    assert refused.value.problems[0].nearest == "trl"
