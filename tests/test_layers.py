"""Allowed imports between modules, read from the source. The table is the design: a new import is a decision
to make."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from sources import PACKAGE, sources

MAY_IMPORT = {
    "errors": "",
    "extras": "errors",
    "author": "errors",
    "processes": "errors author",
    "checkpoints": "errors processes",
    "training": "errors author processes",
    "compiler": "errors author processes training",
    "data": "errors extras author processes training",
    "rewards": "errors extras author processes data",
    "execution": "errors author processes training compiler data rewards",
    "config": "errors extras author processes training compiler data rewards execution",
    "monitoring": "errors extras author processes checkpoints",
    "services": "errors extras author processes training data rewards config monitoring",
    "cluster": "errors extras author processes training compiler data execution config monitoring",
    "runs": "errors extras author processes checkpoints training compiler data rewards execution config "
    "monitoring services cluster",
    "cli": "errors extras author processes checkpoints compiler data rewards config monitoring services "
    "cluster runs benchmarks algorithms recipes",
    "backends": "errors extras author training checkpoints data",
    "benchmarks": "errors author processes checkpoints training compiler data execution config "
    "monitoring cluster runs",
    "algorithms": "",
    "recipes": "",
    "": "errors extras author",
}
# Names of several classes of which one replaces another: protocols and their implementations, and settings
# that a backend finds by name.
ALIKE = {"Trainer", "Generator", "TrainerSettings", "GeneratorSettings", "Settings", "Commit", "Workers"}


@cache
def modules() -> list[tuple[Path, str, ast.Module]]:
    """Return (path, module without ``rlflow.``, tree) of each file of the package."""
    return [
        (each.path, each.module.removeprefix("rlflow").removeprefix("."), each.tree)
        for each in sources(*PACKAGE)
    ]


def layer(module: str) -> str:
    return next(
        (
            name
            for name in sorted(MAY_IMPORT, key=len, reverse=True)
            if module == name or module.startswith(f"{name}.")
        ),
        module,
    )


@cache
def imports(tree: ast.Module) -> list[tuple[str, bool]]:
    """Return (imported name, whether at module level) for each import outside ``if TYPE_CHECKING``."""
    return [(name, top) for node, top in import_statements(tree, top=True) for name in imported(node)]


def import_statements(node: ast.AST, top: bool) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """Return the imports among the statements below a node; expressions cannot contain one."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, top
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and not of_types_alone(child):
            yield from import_statements(child, top and not isinstance(child, ast.FunctionDef))


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the names that a statement imports; for the package itself, modules are separated from exported
    names."""
    names = [alias.name for alias in node.names]
    if isinstance(node, ast.Import):
        return names
    own = [f"rlflow.{name}" for name in names if name in MAY_IMPORT]
    return own if node.module == "rlflow" and own else [str(node.module)]


def of_types_alone(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def ours(tree: ast.Module):
    for name, top in imports(tree):
        if name.partition(".")[0] == "rlflow":
            yield name.removeprefix("rlflow").removeprefix("."), top


def test_there_are_sources_of_every_layer():
    assert {layer(module) for _, module, _ in modules()} == set(MAY_IMPORT)


def test_imports_go_one_way():
    graph = nx.DiGraph((lower, upper) for upper, names in MAY_IMPORT.items() for lower in names.split())
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph) <= set(MAY_IMPORT)


def refused(path: Path, module: str, tree: ast.Module):
    """Return the imports of a module that its layer does not allow, one sentence each."""
    mine = layer(module)
    if mine not in MAY_IMPORT:
        yield f"{path} is in no layer"
        return
    for name, top in ours(tree):
        theirs = layer(name)
        if mine == theirs or theirs in MAY_IMPORT[mine].split():
            continue
        if mine in ("algorithms", "recipes"):
            if name:
                yield f"{path}: {mine} import from rlflow alone, not rlflow.{name}"
        else:
            yield f"{path}: {mine or 'rlflow'} may not import rlflow.{name}{'' if top else ', not even in a function'}"


def test_a_module_imports_what_its_layer_may():
    assert [sentence for module in modules() for sentence in refused(*module)] == []


@pytest.mark.parametrize(
    ("module", "text", "sentence"),
    [
        ("novelty.parts", "", "novelty/parts.py is in no layer"),
        (
            "compiler.graph.model",
            "import rlflow.cluster.rpc.pool",
            "compiler may not import rlflow.cluster.rpc.pool",
        ),
        ("compiler.graph.model", "from rlflow import cluster", "compiler may not import rlflow.cluster"),
        (
            "compiler.graph.model",
            "def draw():\n    from rlflow.execution import executor",
            "compiler may not import rlflow.execution, not even in a function",
        ),
        (
            "algorithms.ppo",
            "from rlflow.author.functional import gae",
            "algorithms import from rlflow alone, not rlflow.author.functional",
        ),
    ],
)
def test_a_forbidden_import_is_named(module, text, sentence):
    [found] = refused(Path(*module.split(".")).with_suffix(".py"), module, ast.parse(text))
    assert found.endswith(sentence)


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (
            "compiler.graph.model",
            "import rlflow.author.columns\nimport rlflow.compiler.graph.wire\nimport torch",
        ),
        ("compiler.graph.model", "if TYPE_CHECKING:\n    from rlflow.execution import executor"),
        ("algorithms.ppo", "from rlflow import flow, stage"),
    ],
)
def test_an_allowed_import_is_not_named(module, text):
    assert list(refused(Path(module), module, ast.parse(text))) == []


def import_graph(of_functions: bool = True) -> nx.DiGraph:
    """Return module → modules of the package that it imports. ``of_functions``: include imports within
    functions."""
    known = {module for _, module, _ in modules()}
    graph: nx.DiGraph = nx.DiGraph()
    for _, module, tree in modules():
        for node, top in import_statements(tree, top=True):
            start = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names = [f"{start}{alias.name}".removeprefix("rlflow.") for alias in node.names]
            of_package = start.removesuffix(".").removeprefix("rlflow").removeprefix(".")
            found = (
                {name if name in known else of_package for name in names}
                if "rlflow" in (start + names[0])
                else set()
            )
            graph.add_edges_from((module, name) for name in found & known - {module} if top or of_functions)
    return graph


def test_no_import_cycle_has_more_than_two_modules():
    """Includes imports in functions."""
    graph = import_graph()
    assert graph.number_of_edges() > 1000
    assert [circle for circle in nx.strongly_connected_components(graph) if len(circle) > 2] == []


def test_importing_the_package_needs_no_torch():
    """Tracing and checking a flow do not need it either, until the check calls functions of a valid flow."""
    graph = import_graph(of_functions=False)
    starts = {"", "author.load", "compiler.trace.compile", "compiler.check.checker"}
    light = starts.union(*(nx.descendants(graph, start) for start in starts))
    heavy = ("torch", "ray", "transformers", "datasets", "vllm", "deepspeed", "numpy")
    assert "compiler.trace.rules" in light
    assert [
        (module, name)
        for _, module, tree in modules()
        if module in light
        for name, top in imports(tree)
        if top and name.partition(".")[0] in heavy
    ] == []


def test_only_the_cluster_layer_imports_ray():
    """The same holds for compared systems, which may use Ray themselves."""
    found = [
        str(path)
        for path, module, tree in modules()
        if layer(module) != "cluster" and not module.startswith("benchmarks.peers.")
        for name, _ in imports(tree)
        if name.partition(".")[0] == "ray"
    ]
    assert found == []


def test_no_file_has_a_meaningless_name():
    names = {path.stem for path, _, _ in modules()} | {path.parent.name for path, _, _ in modules()}
    assert not names & {
        "utils",
        "util",
        "helpers",
        "helper",
        "common",
        "misc",
        "tools",
        "base",
        "core",
        "manager",
    }


def test_each_class_name_is_unique():
    """Comparisons use their own words for what they measure."""
    places: dict[str, list[Path]] = {}
    for path, module, tree in modules():
        for node in tree.body if layer(module) not in ("algorithms", "benchmarks") else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in ALIKE} == {}
    assert [name for name in sorted(ALIKE) if len(places.get(name, [])) < 2 and name != "Settings"] == []


@cache
def calls(tree: ast.Module) -> list[tuple[ast.Call, str]]:
    """Return each call with the text of the called expression."""
    return [(node, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_no_stored_file_is_a_pickle():
    pickling = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    under_way = {
        ("cluster.setup", "cloudpickle"),
        ("cluster.rpc.message", "cloudpickle"),
        ("cluster.rpc.replies", "cloudpickle"),
    }
    found = [
        (str(path), name)
        for path, module, tree in modules()
        for name, _ in imports(tree)
        if name.partition(".")[0] in pickling and (module, name) not in under_way
    ]
    found += [
        (str(path), called)
        for path, _, tree in modules()
        for _, called in calls(tree)
        if called in ("torch.save", "torch.load")
    ]
    assert found == []


def test_text_becomes_code_only_when_a_users_file_is_loaded():
    found = {
        str(path)
        for path, _, tree in modules()
        for _, called in calls(tree)
        if called in ("eval", "exec", "builtins.exec")
    }
    # the text of a user's file as the run read it at its start; code of a model, in a process that can only
    # compute
    assert found == {"rlflow/rewards/scorers.py", "rlflow/rewards/environments/shipped/sandbox.py"}
    loads = {
        str(path)
        for path, _, tree in modules()
        for _, called in calls(tree)
        if called.endswith(".exec_module")
    }
    # the systems of a suite; installed packages
    assert loads == {"rlflow/author/load.py", "benchmarks/suite/child.py", "rlflow/extras.py"}


def test_code_of_a_model_folder_never_runs():
    found = [
        str(path)
        for path, _, tree in modules()
        for call, _ in calls(tree)
        for keyword in call.keywords
        if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
    ]
    assert found == []


def test_loading_from_a_model_folder_forbids_its_code():
    """Without the argument, transformers asks and reads the answer from standard input."""
    found = [
        f"{path}:{call.lineno}"
        for path, _, tree in modules()
        for call, called in calls(tree)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
        and called.startswith(("Auto", "kind"))
        and not any(keyword.arg in ("trust_remote_code", None) for keyword in call.keywords)
    ]
    assert found == []
