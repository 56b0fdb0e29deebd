"""What the mutation command does to a source, and which tests judge it."""

import ast
from pathlib import Path

import pytest
from equivalents import equivalents, reason
from judges import ROOT, batches, judges, module_of
from mutants import mutants
from tree import Tree

SOURCE = '''
LIMIT = 3


def chosen(values: list[int], most: int = 5) -> int | None:
    """The é first."""
    if not values and most > 1:
        raise ValueError(f"found {1 + 2}")
    total = sum(
        values
    ) - 1
    return total if True else None
'''


def test_every_mutant_is_one_change_within_a_function_and_other_lines_keep_their_numbers():
    found = [(mutant.kind, mutant.line, mutant.before, mutant.after) for mutant in mutants(SOURCE)]
    assert found == [
        ("condition", 7, "not values and most > 1", "not (not values and most > 1)"),
        ("boolean", 7, "not values and most > 1", "not values or most > 1"),
        ("boolean", 7, "not values", "values"),
        ("comparison", 7, "most > 1", "most >= 1"),
        ("constant", 7, "1", "2"),
        ("deleted", 8, 'raise ValueError(f"found {1 + 2}")', "pass"),
        ("deleted", 9, "total = sum( values ) - 1", "pass"),
        ("arithmetic", 9, "sum( values ) - 1", "sum(values) + 1"),
        ("constant", 11, "1", "2"),
        ("returned", 12, "return total if True else None", "return None"),
        ("condition", 12, "True", "not True"),
        ("constant", 12, "True", "False"),
    ]
    for mutant in mutants(SOURCE):
        changed = mutant.applied(SOURCE)
        assert changed != SOURCE
        assert changed.count("\n") == SOURCE.count("\n")
        ast.parse(changed)


def test_whether_a_zip_is_strict_is_left_alone():
    found = [(mutant.before, mutant.after) for mutant in mutants("def f(a, b):\n    g(zip(a, b, strict=True), reverse=True)\n")]
    assert found == [("g(zip(a, b, strict=True), reverse=True)", "pass"), ("True", "False")]


def test_a_mutant_is_equivalent_where_file_texts_and_line_are_those_that_are_listed():
    path, listed = Path("rlflow/one.py"), {"file": "rlflow/one.py", "before": "1", "after": "2", "why": "nobody looks"}
    first, last = (mutant for mutant in mutants("def f():\n    a = 1\n    return [1]\n") if mutant.before == "1")
    source = "def f():\n    a = 1\n    return [1]\n"
    assert [reason([listed], path, mutant, source) for mutant in (first, last)] == ["nobody looks"] * 2
    assert [reason([listed | {"line": "return [1]"}], path, mutant, source) for mutant in (first, last)] == ["", "nobody looks"]
    assert reason([listed], Path("rlflow/other.py"), first, source) == ""


def test_every_equivalent_is_a_mutant_of_the_sources_as_they_are():
    for one in equivalents():
        source = (ROOT / one["file"]).read_text()
        assert [mutant for mutant in mutants(source) if reason([one], Path(one["file"]), mutant, source)], one


@pytest.mark.slow
def test_a_module_is_judged_by_its_mirror_by_who_imports_it_and_by_the_tests_beside():
    found = judges(Path("rlflow/simulate.py"))
    assert "tests/simulate/test_simulate.py" in found
    assert judges(Path("rlflow/graph/wire.py"))[0] == "tests/graph/test_wire.py"
    assert "tests/runs/test_canary.py" in judges(Path("rlflow/runs/canary.py"))
    assert all((ROOT / test).exists() for test in found)


@pytest.mark.slow
def test_mirrors_judge_before_others_and_slow_tests_only_where_they_are_listed():
    (first, slow), (others, also_slow), (listed, last_slow) = batches(Path("rlflow/simulate.py"))
    assert first[0] == "tests/simulate/test_simulate.py"
    assert not {*first} & {*others}
    assert (slow, also_slow, last_slow, listed) == (False, False, True, [])
    assert batches(Path("rlflow/reshard/mailbox.py"))[2] == (["tests/cluster/weights/test_endpoints.py"], True)


@pytest.mark.slow
def test_every_source_has_tests_that_judge_it():
    sources = [path.relative_to(ROOT) for root in ("rlflow", "backends") for path in sorted((ROOT / root).rglob("*.py"))]
    assert [str(path) for path in sources if path.stem != "__init__" and not judges(path)] == []


@pytest.mark.parametrize(("path", "name"), [
    ("rlflow/batch.py", "rlflow.batch"), ("backends/null.py", "rlflow.backends.null"), ("rlflow/graph/__init__.py", "rlflow.graph"),
])  # fmt: skip
def test_a_source_is_imported_by_its_name(path, name):
    assert module_of(Path(path)) == name


@pytest.mark.slow
def test_a_mutant_is_judged_in_a_copy_which_is_then_as_it_was(tmp_path):
    path, tests = Path("rlflow/columns.py"), ["tests/test_columns.py"]
    source = (ROOT / path).read_text()
    tree = Tree.copied(tmp_path)
    try:
        assert tree.verdict(path, source, [(tests, False)], 120, 1_000_000_000) == ("survived", "")
        assert tree.verdict(path, f"{source}\nraise RuntimeError\n", [(tests, False)], 120, 1_000_000_002)[0] == "killed"
        asleep = f"{source}\nimport time; time.sleep(600)\n"
        assert tree.verdict(path, asleep, [(tests, False)], 3, 1_000_000_004) == ("timeout", "")
        assert tree.verdict(path, source, [(tests, False)], 120, 1_000_000_006) == ("survived", "")
    finally:
        tree.close()
    assert (tmp_path / path).read_text() == (ROOT / path).read_text() == source
