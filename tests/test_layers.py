"""Who may import whom, read from the source. The table is the design: an import that is not in it is a decision to be made."""

import ast
from pathlib import Path

import networkx as nx
import pytest

HERE = Path(__file__).parents[1]
ROOTS = {"rlflow": "rlflow", "backends": "rlflow.backends", "algorithms": "rlflow.algorithms"}
MAY_IMPORT = {
    "errors": "",
    "interfaces": "errors",
    "columns": "",
    "dispatch": "",
    "extras": "errors",
    "author": "errors columns dispatch",
    "lending": "",
    "seeds": "",
    "pretrained": "errors",
    "watchdog": "",
    "deadline": "",
    "process": "watchdog",
    "durable": "process",
    "logs": "durable",
    "batch": "errors columns author lending",
    "maths": "author",
    "graph": "errors columns",
    "trace": "errors columns dispatch author graph",
    "check": "errors author graph trace",
    "placement": "errors columns graph",
    "residency": "errors",
    "plan": "graph trace placement residency",
    "passes": "graph trace placement plan",
    "schedule": "graph plan",
    "spans": "",
    "simulate": "errors graph plan passes schedule spans",
    "passes.residency": "errors graph placement plan passes simulate residency",
    "explain": "errors columns graph trace placement plan passes simulate reshard residency",
    "reshard": "errors process seeds",
    "training": "errors columns author batch seeds",
    "checkpoints": "errors process durable",
    "execution": "errors columns dispatch author batch maths graph trace plan passes schedule spans training reshard residency "
                 "deadline watchdog seeds",
    "backends": "errors extras pretrained columns author batch seeds training checkpoints reshard",
    "cluster": "errors columns dispatch author batch graph trace execution training data given placement spans reshard "
               "residency lending process watch deadline watchdog interfaces",
    "data": "errors columns extras batch pretrained",
    "rewards": "errors columns extras batch data deadline watchdog",
    "tasks": "",
    "watch": "errors extras process durable logs interfaces",
    "given": "errors extras pretrained columns author batch graph trace execution data rewards training",
    "runs": "errors extras pretrained columns author batch graph trace check placement plan passes passes.residency residency spans "
            "training execution data rewards tasks checkpoints watch given cluster explain durable logs watchdog seeds",
    "cli": "errors extras author graph trace check placement explain plan rewards checkpoints watch given runs residency watchdog",
    "algorithms": "",
    "tasks.arithmetic": "data runs pretrained",
    "": "errors columns dispatch author",
}  # fmt: skip
VERSION = {("cli.main", ""), ("runs.prepare", ""), ("runs.depends", ""), ("runs.pools", ""), ("cluster.setup", "")}  # said, recorded
WITHIN_FUNCTIONS = {  # what a call needs and an import of the module must not load
    ("author.flow", "execution.eager"): "calling a flow runs it",
    ("author.scope", "execution.eager"): "a stage called outside any flow runs at once",
    ("author.load", ""): "the names that rlflow exports, for the nearest",
}


def sources():
    for root, package in ROOTS.items():
        for path in sorted((HERE / root).rglob("*.py")):
            names = [package, *path.relative_to(HERE / root).with_suffix("").parts]
            module = ".".join(names).removesuffix(".__init__").removeprefix("rlflow").removeprefix(".")
            yield path.relative_to(HERE), module, ast.parse(path.read_text())


SOURCES = list(sources())


def layer(module: str) -> str:
    return next((name for name in sorted(MAY_IMPORT, key=len, reverse=True) if module == name or module.startswith(f"{name}.")), module)


def imports(tree: ast.Module):
    """(name of ours, whether at module level) for each import outside ``if TYPE_CHECKING``."""
    typing_only = {
        inner for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) for inner in ast.walk(node)
    }
    within = {inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) and node not in typing_only:
            names = [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):  # of the package itself, modules are told from names that it exports
                modules = [f"rlflow.{name}" for name in names if name in MAY_IMPORT]
                names = modules if node.module == "rlflow" and modules else [str(node.module)]
            yield from ((name, node not in within) for name in names)


def ours(tree: ast.Module):
    for name, top in imports(tree):
        if name.partition(".")[0] == "rlflow":
            yield name.removeprefix("rlflow").removeprefix("."), top


def test_there_are_sources_of_every_layer():
    assert {layer(module) for _, module, _ in SOURCES} == set(MAY_IMPORT)


def test_imports_go_one_way():
    graph = nx.DiGraph((lower, upper) for upper, names in MAY_IMPORT.items() for lower in names.split())
    assert nx.is_directed_acyclic_graph(graph)
    assert set(graph) <= set(MAY_IMPORT)


@pytest.mark.parametrize(("path", "module", "tree"), SOURCES, ids=[module or "rlflow" for _, module, _ in SOURCES])
def test_a_module_imports_what_its_layer_may(path, module, tree):
    mine = layer(module)
    assert mine in MAY_IMPORT, f"{path} is in no layer"
    for name, top in ours(tree):
        theirs = layer(name)
        if mine == theirs or theirs in MAY_IMPORT[mine].split() or (module, name) in VERSION:
            continue
        if mine == "algorithms":
            assert "." not in name, f"{path}: an algorithm imports from rlflow alone, not rlflow.{name}"
            continue
        assert not top, f"{path}: {mine or 'rlflow'} may not import rlflow.{name}"
        assert (module, name) in WITHIN_FUNCTIONS, f"{path}: {mine or 'rlflow'} may not import rlflow.{name}, not even in a function"


def test_importing_the_package_needs_no_torch():
    light = {"errors", "columns", "dispatch", "extras", "author", "graph", "trace", "check", ""}
    heavy = ("torch", "ray", "transformers", "datasets", "vllm", "deepspeed", "numpy")
    found = [(str(path), name) for path, module, tree in SOURCES if layer(module) in light
             for name, top in imports(tree) if top and name.partition(".")[0] in heavy]  # fmt: skip
    assert found == []


def test_only_the_cluster_layer_imports_ray():
    found = [str(path) for path, module, tree in SOURCES if layer(module) != "cluster"
             for name, _ in imports(tree) if name.partition(".")[0] == "ray"]  # fmt: skip
    assert found == []


def test_no_file_is_called_after_nothing():
    names = {path.stem for path, _, _ in SOURCES} | {path.parent.name for path, _, _ in SOURCES}
    assert not names & {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base", "core", "manager"}


def calls(tree):
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_at_rest_is_a_pickle():
    modules = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    found = [(str(path), name) for path, _, tree in SOURCES for name, _ in imports(tree) if name.partition(".")[0] in modules]
    found += [(str(path), ast.unparse(call.func)) for path, _, tree in SOURCES for call in calls(tree)
              if ast.unparse(call.func) in ("torch.save", "torch.load")]  # fmt: skip
    assert found == []


def test_text_becomes_code_only_where_a_users_file_is_loaded():
    found = {str(path) for path, _, tree in SOURCES for call in calls(tree) if ast.unparse(call.func) in ("eval", "exec", "builtins.exec")}
    assert found == {"rlflow/rewards/scorers.py"}  # the text of a reward file, as the run read it at its start
    loads = {str(path) for path, _, tree in SOURCES for call in calls(tree)
             if isinstance(call.func, ast.Attribute) and call.func.attr == "exec_module"}  # fmt: skip
    assert loads == {"rlflow/author/load.py"}


def test_no_code_of_a_model_folder_is_run():
    found = [str(path) for path, _, tree in SOURCES for call in calls(tree) for keyword in call.keywords
             if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"]  # fmt: skip
    assert found == []


def test_what_is_loaded_from_a_model_folder_says_that_it_runs_no_code():
    """Where nothing is said, transformers asks, and takes the answer from standard input."""
    found = [f"{path}:{call.lineno}" for path, _, tree in SOURCES for call in calls(tree)
             if isinstance(call.func, ast.Attribute) and call.func.attr in ("from_pretrained", "from_config")
             and ast.unparse(call.func.value).startswith(("Auto", "kind"))
             and not any(keyword.arg in ("trust_remote_code", None) for keyword in call.keywords)]  # fmt: skip
    assert found == []
