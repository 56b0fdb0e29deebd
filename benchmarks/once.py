"""Check that a run does its setup work only once: `python benchmarks/once.py [--pools all=2]`.

Runs one small iteration of ppo. Prints how often each process resolved the settings of a role's side, read
the headers of a model folder, placed roles, and ran all compiler passes. Also lists the functions that take
the run's configuration, and the places that look up capabilities of a backend by name; both are found in the
source. Exits with 1 if something is repeated or a limit is exceeded.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDER = "RLFLOW_COUNTS"  # environment variable: the driver's process id, and the folder of workers' counts
MOST_FUNCTIONS = 32  # most functions that may take the configuration
CONFIG = ("rlflow.config.flags", "RunConfig")
# the file that defines the capabilities of backends as fields and methods
PROTOCOLS = "rlflow/training/protocols.py"
# work → (module, function, name of the object from the function's arguments)
COUNTED: dict[str, tuple[str, str, Callable[[dict[str, Any]], str]]] = {
    "settings": (
        "rlflow.config.roles.bound",
        "settings",
        lambda local: f"{local['config'].name}.{local['half']}",
    ),
    "headers": ("rlflow.compiler.byte_sizes", "ModelFacts.of", lambda local: str(local["folder"])),
    "placement": ("rlflow.compiler.placement", "place", lambda local: ""),
    "layouts": ("rlflow.runs.planning", "with_parallelism", lambda local: ""),
    "passes": ("rlflow.compiler.passes", "plan", lambda local: ""),
}


# -- counts of a run
# ------------------------------------------------------------------------------------------------------------


class Counts:
    """Counts calls of the functions in ``COUNTED``, under every name by which a module imports them.

    The counts are kept in a file, because workers are killed at the end of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.path, self.turn, self.sums = folder / f"{os.getpid()}.json", threading.Lock(), Counter[str]()
        self.replaced: list[tuple[Any, str, Any]] = []  # (module or class, name, original)

    def begin(self) -> None:
        """Start counting."""
        for what, (module, name, of) in COUNTED.items():
            owner, _, last = name.rpartition(".")
            place = importlib.import_module(module)
            if owner:
                self._replace(
                    getattr(place, owner),
                    last,
                    staticmethod(self._counting(getattr(getattr(place, owner), last), what, of)),
                )
                continue
            function = getattr(place, last)
            counting = self._counting(function, what, of)
            for each in [each for title, each in sys.modules.items() if title.startswith("rlflow")]:
                for alias in [alias for alias, value in vars(each).items() if value is function]:
                    self._replace(each, alias, counting)

    def end(self) -> None:
        """Restore the original functions."""
        for place, name, before in self.replaced:
            setattr(place, name, before)

    def _replace(self, place: Any, name: str, counting: Any) -> None:
        self.replaced.append((place, name, vars(place)[name]))
        setattr(place, name, counting)

    def _counting(
        self, function: Callable[..., Any], what: str, of: Callable[[dict[str, Any]], str]
    ) -> Callable[..., Any]:
        signature = inspect.signature(function)

        def counted(*args: Any, **keywords: Any) -> Any:
            with self.turn:
                self.sums[f"{what} {of(signature.bind(*args, **keywords).arguments)}".strip()] += 1
                self.path.write_text(json.dumps(self.sums))
            return function(*args, **keywords)

        return counted


def begin() -> None:
    """Start counting in a worker. The flow's file calls this function when a worker loads the file."""
    if FOLDER in os.environ and os.environ[FOLDER].partition(" ")[0] != str(os.getpid()):
        Counts(Path(os.environ[FOLDER].partition(" ")[2])).begin()


def counted_run(folder: Path, **keywords: Any) -> tuple[dict[str, int], list[dict[str, int]]]:
    """Run one iteration of ppo. Returns (counts of the driver, counts of each worker)."""
    import rlflow
    import rlflow.runs.prepare
    from rlflow.config.footprint import _facts as model_facts_of_file

    model_facts_of_file.cache_clear()  # an earlier run in this process may have read the headers
    flow, counts = folder / "ppo.py", Counts(folder)
    flow.write_text(
        f"{(ROOT / 'algorithms' / 'ppo.py').read_text()}\n\nimport "
        f"runpy\nrunpy.run_path({__file__!r})['begin']()\n"
    )
    os.environ[FOLDER] = f"{os.getpid()} {folder}"
    counts.begin()
    try:
        rlflow.run(
            str(flow),
            iterations=1,
            prompts=4,
            held_out=4,
            save_every=0,
            threads=1,
            out=str(folder / "runs"),
            **{"hp.max_tokens": 4},
            **keywords,
        )
    finally:
        counts.end()
        del os.environ[FOLDER]
    driver = json.loads((folder / f"{os.getpid()}.json").read_text())
    return driver, [
        json.loads(path.read_text())
        for path in sorted(folder.glob("*.json"))
        if path.stem != str(os.getpid())
    ]


def more_than_once(driver: dict[str, int], workers: list[dict[str, int]]) -> list[str]:
    """Return a line for each piece of repeated work.

    Repeated work is what a process did twice, and placement or planning by a worker.
    """
    repeated = [
        f"{process}: {what}, {count} times"
        for process, sums in (("driver", driver), *(("worker", each) for each in workers))
        for what, count in sums.items()
        if count > 1
    ]
    return repeated + [
        f"worker: {what}"
        for each in workers
        for what in each
        if what.split()[0] in ("placement", "layouts", "passes")
    ]


# -- the source
# ------------------------------------------------------------------------------------------------------------


# name of a module, its path from the root, all nodes of its syntax tree
Module = tuple[str, Path, list[ast.AST]]


def package() -> list[Module]:
    """Parse every file of the package."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "rlflow").rglob("*.py"))]
    return [
        (
            ".".join(path.with_suffix("").parts).removesuffix(".__init__"),
            path,
            list(ast.walk(ast.parse((ROOT / path).read_text()))),
        )
        for path in paths
    ]


def named(
    annotation: ast.expr | None, module: str, imports: dict[str, tuple[str, str]]
) -> set[tuple[str, str]]:
    """Return everything that an annotation names, as (module, name).

    The argument of Pool[Worker] is ignored, because a pool only has handles of processes.
    """
    nodes = list(ast.walk(annotation)) if annotation is not None else []
    pools = [node for node in nodes if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Pool"]
    remote = {inner for pool in pools for inner in ast.walk(pool.slice)}
    return {
        imports.get(node.id, (module, node.id))
        for node in nodes
        if isinstance(node, ast.Name) and node not in remote
    }


def contents(cls: ast.ClassDef) -> list[ast.expr | None]:
    """Return the annotations of a class's fields, and of the parameters that ``__init__`` stores
    unchanged.
    """
    makers = [item for item in cls.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
    taken = {
        each.arg: each.annotation for maker in makers for each in (*maker.args.args, *maker.args.kwonlyargs)
    }
    values = [
        node.value
        for maker in makers
        for node in ast.walk(maker)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith(("self.", "(self."))
    ]
    names = [
        each
        for value in values
        for each in (value.elts if isinstance(value, ast.Tuple) else [value])
        if isinstance(each, ast.Name)
    ]
    return [
        *(item.annotation for item in cls.body if isinstance(item, ast.AnnAssign)),
        *(taken.get(name.id) for name in names),
    ]


def imported(nodes: list[ast.AST]) -> dict[str, tuple[str, str]]:
    """Return (module, name) of each imported object, by its name in the importing module."""
    found = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name: (node.module or "", alias.name) for node in found for alias in node.names
    }


def takers(modules: Sequence[Module]) -> list[str]:
    """Return the functions with a parameter annotated as the run's configuration or as an object that
    contains it.

    The configuration may be at any depth inside the object.
    """
    sources = [(module, path, nodes, imported(nodes)) for module, path, nodes in modules]
    fields = {
        (module, node.name): contents(node)
        for module, _, nodes, _ in sources
        for node in nodes
        if isinstance(node, ast.ClassDef)
    }
    imports = {module: names for module, _, _, names in sources}
    holders, before = {CONFIG}, set[tuple[str, str]]()
    while holders != before:
        before = set(holders)
        holders |= {
            place
            for place, each in fields.items()
            if any(named(one, place[0], imports[place[0]]) & before for one in each)
        }
    return [
        f"{path}:{node.lineno} {node.name}"
        for module, path, nodes, names in sources
        for node in nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and any(
            named(each.annotation, module, names) & holders
            for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        )
    ]


def optional() -> set[str]:
    """Return the names of all optional capabilities of a backend."""
    classes = [
        node for node in ast.parse((ROOT / PROTOCOLS).read_text()).body if isinstance(node, ast.ClassDef)
    ]
    fields = {
        each.target.id
        for cls in classes
        if cls.name == "Capabilities"
        for each in cls.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    checked = [
        cls for cls in classes if any(ast.unparse(each) == "runtime_checkable" for each in cls.decorator_list)
    ]
    return fields | {each.name for cls in checked for each in cls.body if isinstance(each, ast.FunctionDef)}


def probes(modules: Sequence[Module]) -> list[str]:
    """Return the places in the source that look up a backend's capability with getattr or hasattr."""
    names = optional()
    return [
        f"{path}:{call.lineno} {call.args[1].value}"
        for _, path, nodes in modules
        for call in nodes
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Name)
        and call.func.id in ("getattr", "hasattr")
        and len(call.args) > 1
        and isinstance(call.args[1], ast.Constant)
        and call.args[1].value in names
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--pools", default="", help="pools as for rlflow run, such as all=2 (default: one process)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        driver, workers = counted_run(Path(folder), **({"pools": options.pools} if options.pools else {}))
    for name, sums in (("driver", driver), *(("worker", each) for each in workers)):
        print(name, *(f"  {what}: {count}" for what, count in sorted(sums.items())), sep="\n")
    modules = package()
    taking, probing, repeated = takers(modules), probes(modules), more_than_once(driver, workers)
    print(
        f"{len(taking)} functions take the configuration; the limit is {MOST_FUNCTIONS}",
        *(f"  {each}" for each in taking),
        sep="\n",
    )
    print(
        f"{len(probing)} places look up a backend's capability by its name",
        *(f"  {each}" for each in probing),
        sep="\n",
    )
    print(*(repeated or ["no work is repeated"]), sep="\n")
    return 1 if repeated or probing or len(taking) > MOST_FUNCTIONS else 0


if __name__ == "__main__":
    sys.exit(main())
