"""The mutation command: its changes of a source, the choice of tests, and the verdicts."""

import ast
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import probe
import pytest
from equivalents import equivalents, reason
from mutants import mutants
from probes import probed
from rule import of_folder, stages
from sources import ROOT
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


def test_a_mutant_changes_one_place_and_keeps_line_numbers():
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


def test_strict_of_zip_is_not_mutated():
    found = [
        (mutant.before, mutant.after)
        for mutant in mutants("def f(a, b):\n    g(zip(a, b, strict=True), reverse=True)\n")
    ]
    assert found == [("g(zip(a, b, strict=True), reverse=True)", "pass"), ("True", "False")]


def test_a_listed_mutant_is_equivalent():
    path, listed = (
        Path("rlflow/one.py"),
        {"file": "rlflow/one.py", "before": "1", "after": "2", "why": "nobody looks"},
    )
    first, last = (
        mutant for mutant in mutants("def f():\n    a = 1\n    return [1]\n") if mutant.before == "1"
    )
    source = "def f():\n    a = 1\n    return [1]\n"
    assert [reason([listed], path, mutant, source) for mutant in (first, last)] == ["nobody looks"] * 2
    assert [reason([listed | {"line": "return [1]"}], path, mutant, source) for mutant in (first, last)] == [
        "",
        "nobody looks",
    ]
    assert reason([listed], Path("rlflow/other.py"), first, source) == ""


def test_every_listed_equivalent_exists_in_the_sources():
    for one in equivalents():
        source = (ROOT / one["file"]).read_text()
        assert [mutant for mutant in mutants(source) if reason([one], Path(one["file"]), mutant, source)], one


def test_probes_keep_results_and_record_hits_in_forks(tmp_path):
    source = "def f(a):\n    match a:\n        case 1 if a: return 3\n        case _: b = a + 1; return b\n"
    every = dict(enumerate(mutants(source)))
    text, hits = probed(source, every), tmp_path / "hits"
    assert text.count("\n") == source.count("\n")
    assert {text.count(f"rlflow_probe_{number}'") for number in every} == {1}
    probe.made(hits, len(every))
    exec(text, space := {})
    probe.install(str(hits), len(every))
    try:
        child = os.fork()
        if not child:
            os._exit(space["f"](1) != 3)
        assert os.waitpid(child, 0)[1] == 0
        before = {every[number].before for number in probe.hits(hits, 0, len(every))}
        assert before == {"1", "3", "return 3"}
        assert space["f"](5) == 6
        assert probe.hits(hits, 0, len(every)) == [*every]
        assert probe.hits(hits, 1, len(every)) == []
    finally:
        for number in every:
            delattr(__import__("builtins"), f"rlflow_probe_{number}")


def test_tests_that_reach_the_mutant_run_first_fastest_first():
    seconds = {
        "tests/a/test_one.py::slow": 40.0,
        "tests/a/test_one.py::fast": 1.0,
        "tests/b/test_two.py::far": 0.5,
        "tests/a/b/test_three.py::other": 3.0,
        "tests/b/test_two.py::reaches": 0.1,
    }
    covering = ["tests/a/test_one.py::slow", "tests/b/test_two.py::reaches", "tests/a/test_one.py::fast"]
    slow, fast, far, other, reaches = seconds
    assert stages(Path("rlflow/a/one.py"), covering, seconds) == [[reaches, fast], [slow], [other]]
    assert stages(Path("rlflow/a/one.py"), covering, seconds, 4.5) == [[reaches, fast], [other]]
    assert stages(Path("rlflow/c/one.py"), [], seconds) == []
    assert far not in sum(stages(Path("rlflow/a/one.py"), covering, seconds), [])


@pytest.mark.parametrize(
    ("source", "begins"),
    [
        ("rlflow/execution/wire/column_wire.py", "tests/execution/wire/"),
        ("rlflow/cluster/nothing/one.py", "tests/cluster/"),
        ("rlflow/author/batch.py", "tests/author/test_batch.py::"),
        ("backends/local/heap.py", "tests/backends/"),
    ],
)
def test_a_source_uses_the_tests_of_the_nearest_folder(source, begins):
    tests = [
        "tests/execution/wire/test_column_wire.py::a",
        "tests/cluster/test_load.py::b",
        "tests/author/test_batch.py::c",
        "tests/backends/test_x.py::d",
    ]
    assert of_folder(Path(source), tests) == [test for test in tests if test.startswith(begins)]


SMALL = """
def doubled(value):
    return value * 2


def unseen(value):
    return value + 1


def least(value):
    return 0 if value > 0 else value
"""
TESTS = """
import subprocess, sys
import pytest
from rlflow.small import least

@pytest.fixture(scope="module")
def shared():
    return least(1)

def test_of_another_process():
    command = [sys.executable, "-c", "from rlflow.small import doubled; print(doubled(4))"]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == "8"

def test_first(shared):
    assert shared == 0

def test_second(shared):
    assert shared == 0

def test_broken():
    assert least(-1) == 0
"""


FILES = {
    "rlflow/__init__.py": "",
    "rlflow/small.py": SMALL,
    "tests/test_small.py": TESTS,
    "backends/__init__.py": "",
}


@pytest.fixture
def small(tmp_path):
    """Create a repository whose environment has the packages of this one."""
    root = tmp_path / "root"
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (root / ".gitignore").write_text(".venv/\n__pycache__/\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", ".venv"], cwd=root, check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(root / ".venv")}))
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root


@pytest.mark.long
def test_a_suite_kills_mutants_reached_in_any_process(small, tmp_path):
    verdicts = tmp_path / "verdicts.json"
    command = [sys.executable, "benchmarks/mutation", "--tree", str(small), "--json", str(verdicts)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        (row["before"], row["after"]): (row["verdict"], row["by"], row["covering"])
        for row in json.loads(verdicts.read_text())["mutants"]
    }
    assert found["value * 2", "value + 2"] == ("killed", "tests/test_small.py::test_of_another_process", 1)
    assert found["value + 1", "value - 1"] == ("survived", "", 0)
    assert found["0", "1"][0] == "killed"
    # two share what has reached it
    assert {covering for (before, _), (_, _, covering) in found.items() if "value > 0" in before} == {3}


@pytest.mark.long
def test_a_hanging_test_kills_and_an_always_failing_test_does_not(small, tmp_path):
    path, every = (
        Path("rlflow/small.py"),
        [f"tests/test_small.py::test_{name}" for name in ("broken", "of_another_process", "first")],
    )
    tree = Tree.copied(small, tmp_path / "judged" / "t")
    tree.spare = 3.0
    try:
        assert tree.killer(path, SMALL, [every], {}, 1_000_000_000) is None
        assert tree.failing == {every[0]}
        assert (
            tree.killer(
                path,
                SMALL.replace("return 0", "return [0 for _ in iter(int, 1)]"),
                [every],
                {},
                1_000_000_002,
            )
            == every[2]
        )
        assert (
            tree.killer(path, f"{SMALL}\nraise RuntimeError\n", [every[2:]], {}, 1_000_000_004)
            == "tests/test_small.py"
        )
    finally:
        tree.close()
    assert (tree.folder / path).read_text() == (small / path).read_text() == SMALL
