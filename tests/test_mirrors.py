"""Which tests a module has: a file that mirrors it by name, or tests that import it or what it defines. A module without any is in the list
below, with the tests that judge it all the same and why that is enough."""

import ast
from functools import cache
from pathlib import Path

import pytest
from judges import imported, module_of

ROOT = Path(__file__).parents[1]
ELSEWHERE = [  # (modules, the tests that judge them, why they have none of their own)
    ("rlflow/author/scope", "tests/author/test_verbs.py", "what verbs do outside of a flow"),
    ("rlflow/bench/peers/trl", "tests/bench/test_peer.py", "needs an interpreter that has TRL; `rlflow bench peers` makes one"),
    ("rlflow/binding/models", "tests/backends/test_contract.py", "makes the halves of roles, which every run does first"),
    ("rlflow/check/staleness rlflow/trace/rules", "tests/check/test_check.py", "rules, each with a file that breaks it"),
    ("rlflow/checkpoints/tensors", "tests/checkpoints/test_round_trip.py", "what a checkpoint writes and reads"),
    ("rlflow/cli/graphs", "tests/graph/test_diff.py", "prints what graphs are and how they differ"),
    ("rlflow/cluster/sharding/custom_dispatch", "tests/cluster/test_engine.py", "every call of a worker"),
    ("rlflow/cluster/rpc/streams", "tests/cluster/test_streaming.py", "needs workers that answer one after another"),
    ("rlflow/data/records rlflow/data/rendering", "tests/data", "parts of a data set, which is judged whole"),
    ("rlflow/execution/surplus", "tests/runs/test_repeats.py", "what a repeat keeps for the next iteration"),
    ("rlflow/explain/layouts rlflow/explain/waves", "tests/explain/test_explanation.py", "parts of one explanation"),
    ("rlflow/extras", "tests/test_exports.py", "says which package is missing"),
    ("rlflow/graph/lineage", "tests/graph", "what a node of a graph depends on"),
    ("rlflow/memory/inputs", "tests/passes/test_residency.py", "what the pass of residency is given"),
    ("rlflow/reshard/mailbox", "tests/cluster/weights/test_endpoints.py", "messages between the two ends of a transfer"),
    ("rlflow/reshard/verify", "tests/reshard/test_execute.py", "digests that a transfer compares"),
    ("rlflow/rewards/alone rlflow/rewards/hints rlflow/rewards/vocabulary rlflow/rewards/worker",
     "tests/rewards", "what runs beside users' code in its process"),
    ("rlflow/runs/context rlflow/runs/depends rlflow/runs/layout_choice rlflow/runs/parallelism "
     "rlflow/runs/streaming", "tests/runs", "parts of one run, which is judged as users start it"),
    ("rlflow/trace/tracer", "tests/trace/test_compile.py", "tracing is compiling, seen from inside"),
    ("rlflow/watch/mlflow_store", "tests/watch/test_trackers.py", "runs in a process of its own"),
    ("backends/deepspeed/residency backends/deepspeed/start backends/deepspeed/trainer backends/fsdp/folder backends/fsdp/network "
     "backends/fsdp/settings backends/fsdp/tensor_parallel backends/fsdp/trainer backends/vllm/chance "
     "backends/vllm/generator backends/vllm/settings", "tests/backends/test_contract.py",
     "engines: the contract of backends is their test"),
    ("backends/local/padding backends/local/sequences", "tests/backends/test_forward.py", "how rows are laid out for a pass"),
]


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
    several = {"benchmarks", "mutation", "oracles", "simulate"}
    folders = {path.parent.relative_to(ROOT / "tests") for path in files() if path.name.startswith("test_")} - {Path()}
    strange = {folder for folder in folders if not (ROOT / "rlflow" / folder).is_dir() and not (ROOT / folder).is_dir()}
    assert {folder.parts[0] for folder in strange} <= several


@pytest.mark.parametrize(("source", "test"), [
    ("rlflow/batch.py", "tests/test_batch.py"), ("rlflow/cluster/commit.py", "tests/cluster/test_commit.py"),
    ("backends/fsdp/ranks.py", "tests/backends/fsdp/test_ranks.py"),
])  # fmt: skip
def test_a_mirror_has_the_place_and_the_name(source, test):
    assert mirror(Path(source)) == ROOT / test
