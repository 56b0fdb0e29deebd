"""Which tests a module has: a file that mirrors it by name, or tests that import it or what it defines. A module without any is in the list
ELSEWHERE of mutation/judges.py, with the tests that judge it all the same and why that is enough."""

import ast
from functools import cache
from pathlib import Path

import pytest
from judges import ELSEWHERE, imported, module_of

ROOT = Path(__file__).parents[1]


def files():
    return sorted((ROOT / "tests").rglob("*.py"))


def sources():
    return [path.relative_to(ROOT) for folder in ("rlflow", "backends") for path in sorted((ROOT / folder).rglob("*.py"))
            if path.stem != "__init__"]  # fmt: skip


def mirror(source):
    inside = Path(*source.parts[1:]) if source.parts[0] == "rlflow" else source
    return ROOT / "tests" / inside.parent / f"test_{source.stem}.py"


def handed_on():
    """Name that a package exports, in full → the module or package that it comes from."""
    found = {}
    for folder in ("rlflow", "backends"):
        for path in (ROOT / folder).rglob("__init__.py"):
            package = module_of(path.relative_to(ROOT))
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and node.module:
                    found |= {f"{package}.{alias.name}": (node.module, alias.name) for alias in node.names}
    return found


@cache
def used():
    """Modules that tests import, and those that define what tests import from a package."""
    found, exported = set(), handed_on()
    for name in set().union(*map(imported, files())):
        while name in exported:
            module, own = exported[name]
            found.add(module)
            name = f"{module}.{own}"
        found.add(name)
    return found


def elsewhere():
    return [name for names, _, _ in ELSEWHERE for name in names.split()]


@cache
def alone():
    """Modules without a mirror of which no test imports anything."""
    return [str(source.with_suffix("")) for source in sources() if not mirror(source).exists() and module_of(source) not in used()]


def test_every_module_has_tests_of_its_own_or_is_known_to_be_judged_elsewhere():
    assert [module for module in alone() if module not in elsewhere()] == []


def test_the_list_has_no_line_that_nothing_needs():
    assert [module for module in elsewhere() if module not in alone()] == []
    assert [judge for _, judge, why in ELSEWHERE if not (ROOT / judge).exists() or not why] == []


def test_tests_lie_where_the_package_does_that_they_judge_but_for_those_that_judge_several():
    several = {"benchmarks", "mutation", "oracles", "simulate", "trial"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in files() if path.name.startswith("test_")} - {Path()}
    strange = {folder for folder in folders if not (ROOT / "rlflow" / folder).is_dir() and not (ROOT / folder).is_dir()}
    assert {folder.parts[0] for folder in strange} <= several


@pytest.mark.parametrize(("source", "test"), [
    ("rlflow/batch.py", "tests/test_batch.py"), ("rlflow/cluster/commit.py", "tests/cluster/test_commit.py"),
    ("backends/fsdp/ranks.py", "tests/backends/fsdp/test_ranks.py"),
])  # fmt: skip
def test_a_mirror_has_the_place_and_the_name(source, test):
    assert mirror(Path(source)) == ROOT / test
