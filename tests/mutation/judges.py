"""Which quick tests judge a module: those that mirror it by path or are listed for it, those that import it, and the other tests of its
package; where there are none, those of the modules that import it. Slow ones: of the files that are listed for it alone."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ELSEWHERE = [  # (modules, the tests that judge them, why they have none of their own)
    ("rlflow/author/scope", "tests/author/test_verbs.py", "what verbs do outside of a flow"),
    ("rlflow/bench/peers/trl", "tests/bench/test_peer.py", "needs an interpreter that has TRL; `rlflow bench peers` makes one"),
    ("rlflow/bench/peers/verl", "tests/bench/test_peer.py", "needs an interpreter that has verl; `rlflow bench dispatch` makes one"),
    ("rlflow/check/reached", "tests/check/test_rewarded.py", "the walk behind the problems of rewards"),
    ("rlflow/check/staleness", "tests/check/test_check.py", "rules, each with a file that breaks it"),
    ("rlflow/checkpoints/tensors", "tests/checkpoints/test_round_trip.py", "what a checkpoint writes and reads"),
    ("rlflow/cluster/sharding/custom_dispatch", "tests/cluster/test_engine.py", "every call of a worker"),
    ("rlflow/data/records rlflow/data/rendering", "tests/data", "parts of a data set, which is judged whole"),
    ("rlflow/execution/surplus", "tests/runs/test_repeats.py", "what a repeat keeps for the next iteration"),
    ("rlflow/explain/layouts rlflow/explain/waves", "tests/explain/test_explanation.py", "parts of one explanation"),
    ("rlflow/proof/pushes", "tests/proof/test_planted.py", "gradients by which claims are judged"),
    ("rlflow/runs/plans_compared", "tests/cli/test_prove.py", "what a flag of the command does"),
    ("rlflow/services/health rlflow/services/process rlflow/services/recipes", "tests/services/test_running.py", "what real services need"),
    ("rlflow/serving/vectors", "tests/serving/test_retrieve.py", "ranks what the server answers"),
    ("rlflow/reshard/mailbox", "tests/cluster/weights/test_endpoints.py", "messages between the two ends of a transfer"),
    ("rlflow/reshard/verify", "tests/reshard/test_execute.py", "digests that a transfer compares"),
    ("rlflow/rewards/alone rlflow/rewards/hints rlflow/rewards/worker",
     "tests/rewards", "what runs beside users' code in its process"),
    ("rlflow/runs/context rlflow/runs/depends rlflow/runs/layout_choice rlflow/runs/parallelism "
     "rlflow/runs/streaming", "tests/runs", "parts of one run, which is judged as users start it"),
    ("rlflow/environments/shipped/sandbox", "tests/environments/shipped/test_python.py", "runs in a process of its own"),
    ("rlflow/environments/worker", "tests/environments/test_pool.py", "runs in a process of its own"),
    ("rlflow/trace/tracer", "tests/trace/test_compile.py", "tracing is compiling, seen from inside"),
    ("rlflow/watch/mlflow_store", "tests/watch/test_trackers.py", "runs in a process of its own"),
    ("backends/deepspeed/residency backends/deepspeed/start backends/fsdp/folder backends/fsdp/network "
     "backends/fsdp/tensor_parallel backends/fsdp/trainer backends/vllm/chance "
     "backends/vllm/generator backends/vllm/settings", "tests/backends/test_contract.py",
     "engines: the contract of backends is their test"),
    ("backends/local/padding", "tests/backends/test_packing.py", "which mask a pass is given"),
]
FEW = 3  # test files that import a module, which mirror it too
HEAVY = ("tests/benchmarks", "tests/mutation", "tests/test_packaging.py")  # judge commands and the installation, not modules


def module_of(path: Path) -> str:
    """The name under which a source, relative to the root, is imported: backends/null.py is rlflow.backends.null."""
    names = [*path.with_suffix("").parts] if path.parts[0] == "rlflow" else ["rlflow", *path.with_suffix("").parts]
    return ".".join(names).removesuffix(".__init__")


def mirrors(path: Path, root: Path = ROOT) -> list[str]:
    """Test files that have a source's name, or its folder's: tests/simulate/test_simulate.py for simulate.py,
    tests/backends/test_fsdp.py for backends/fsdp/network.py; those that are listed for it; and those that import it, where at most FEW
    do."""
    inside = Path(*path.parts[1:]) if path.parts[0] == "rlflow" else path
    folder = root / "tests" / inside.parent
    named = f"test_{path.stem}.py"
    places = [folder / named, folder / path.stem / named, root / "tests" / named, folder.with_name(f"test_{folder.name}.py")]
    importers = _importers({module_of(path)}, root)
    places += [*listed(path, root), *(importers if len(importers) <= FEW else [])]
    return [str(place.relative_to(root)) for place in dict.fromkeys(places) if place.exists()]


def batches(path: Path, root: Path = ROOT) -> list[tuple[list[str], bool]]:
    """Test files in the order in which they judge a source, and whether their slow tests do: its mirrors, the other judges, and the slow
    tests of files that are listed for it."""
    first = mirrors(path, root)
    others = [test for test in judges(path, root) if test not in first]
    return [(first, False), (others, False), ([str(test.relative_to(root)) for test in listed(path, root)], True)]


def listed(path: Path, root: Path = ROOT) -> list[Path]:
    """The test files that are listed for a source in ELSEWHERE."""
    judge = next((judge for names, judge, _ in ELSEWHERE if str(path.with_suffix("")) in names.split()), None)
    if judge is None:
        return []
    return [root / judge] if judge.endswith(".py") else sorted((root / judge).glob("test_*.py"))


def _importers(names: set[str], root: Path) -> list[Path]:
    """The test files that import one of these modules."""
    return [test for test in _files(root, ("tests",), "test_*.py") if names & imported(test)]


@cache
def imported(path: Path) -> frozenset[str]:
    """Modules and names that a file imports, each in full."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def judges(path: Path, root: Path = ROOT) -> list[str]:
    """Test files, relative to the root: the mirror of a source first, then who imports it, then the tests beside the mirror."""
    inside = Path(*path.parts[1:]) if path.parts[0] == "rlflow" else path
    package = root / "tests" / inside.parent
    name = path.parent.name if path.stem == "__init__" else path.stem
    mirrors = [package / f"test_{name}.py", root / "tests" / f"test_{name}.py"]
    while not package.exists():
        package = package.parent
    names = {module_of(path), module_of(path.parent)} - {"rlflow"}  # a package gives what its modules define
    importers = _importers(names, root)
    beside = sorted(package.glob("test_*.py")) if package != root / "tests" else []
    tests = [*mirrors, *listed(path, root), *importers, *beside]
    chosen = dict.fromkeys(str(test.relative_to(root)) for test in tests if test.exists())
    found = [test for test in chosen if not test.startswith(HEAVY)]
    return found or sorted({test for user in _users(path, root) for test in judges(user, root)})


def _users(path: Path, root: Path) -> list[Path]:
    """Sources that import this one."""
    return [source.relative_to(root) for source in _files(root, ("rlflow", "backends"), "*.py") if module_of(path) in imported(source)]


@cache
def _files(root: Path, folders: tuple[str, ...], pattern: str) -> list[Path]:
    return [path for folder in folders for path in sorted((root / folder).rglob(pattern))]
