"""Who may import whom, read from the source. The table is the design: an import that is not in it is a decision to be made."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import networkx as nx
import pytest
from sources import PACKAGE, sources

MAY_IMPORT = {
    "errors": "",
    "figures": "",
    "interfaces": "errors",
    "own_lines": "errors",
    "columns": "",
    "words": "errors",
    "dispatch": "",
    "extras": "errors",
    "author": "errors columns dispatch words",
    "copy_on_write": "",
    "seeds": "",
    "pretrained": "errors",
    "spoken": "",
    "watchdog": "",
    "isolation": "",
    "deadline": "",
    "process": "watchdog",
    "clients": "errors process",
    "durable": "process",
    "logs": "durable",
    "axis": "",
    "messages": "",
    "batch": "errors columns author copy_on_write axis messages words",
    "maths": "author",
    "graph": "errors columns",
    "trace": "errors columns dispatch author graph words",
    "check": "errors own_lines columns dispatch author graph trace training maths",
    "placement": "errors columns graph",
    "memory": "errors",
    "memory.sizes": "",
    "plan": "graph trace placement memory",
    "passes": "columns graph trace placement plan",
    "schedule": "graph plan",
    "spans": "",
    "simulate": "errors graph plan passes schedule spans",
    "passes.residency": "errors graph placement plan passes simulate memory",
    "explain": "errors columns graph trace placement plan passes simulate reshard memory memory.sizes",
    "reshard": "errors process seeds",
    "training": "errors columns author batch seeds",
    "checkpoints": "errors process durable",
    "execution": "figures errors columns dispatch author axis batch maths graph trace plan passes schedule spans training reshard memory "
                 "deadline watchdog seeds own_lines messages environments",
    "backends": "errors extras pretrained spoken columns author axis batch seeds training checkpoints reshard",
    "cluster": "errors columns dispatch author axis batch graph trace execution training data config binding placement spans reshard "
               "memory copy_on_write process figures watch deadline watchdog interfaces own_lines messages",
    "launching": "errors author config placement services.declare watch",
    "jobs": "author axis batch columns cluster config data seeds runs training binding maths trace",
    "data": "figures errors columns extras axis batch pretrained isolation messages spoken",
    "rewards": "figures errors clients columns extras axis batch data deadline watchdog isolation own_lines words",
    "environments": "errors clients extras author messages data rewards watchdog isolation services.declare",
    "moving": "errors",
    "services.declare": "errors author",
    "services.addresses": "errors services.declare",
    "services": "errors clients deadline services.declare services.addresses watch watchdog",
    "serving": "errors clients extras pretrained batch columns data rewards environments isolation training binding services.declare",
    "tasks": "",
    "diagnosis": "figures",
    "watch": "figures errors extras process durable logs interfaces isolation diagnosis watchdog",
    "config": "errors author graph services.declare services.addresses words",
    "binding": "figures errors clients extras pretrained columns author axis batch graph trace execution data rewards environments "
               "training config",
    "memory.footprint": "errors graph placement config binding rewards memory.sizes",
    "memory.inputs": "errors placement plan passes.residency config binding memory memory.footprint",
    "proof": "figures errors columns author axis batch seeds graph trace check plan training execution watchdog",
    "runs": "errors clients proof extras pretrained columns author axis batch graph trace check placement plan passes passes.residency "
            "memory memory.sizes memory.footprint memory.inputs spans "
            "training execution data figures rewards environments tasks "
            "checkpoints watch config binding cluster explain durable logs watchdog seeds own_lines "
            "services services.declare services.addresses",
    "bench": "errors author graph trace execution config runs watch durable logs watchdog checkpoints",
    "bench.child": "",
    "bench.peers": "",
    "bench.peers.by_hand": "columns author batch seeds config runs training",  # does what runs do, without the engine
    "bench.peers.chain": "bench.peers runs",
    "bench.peers.dispatch": "axis batch bench.peers columns cluster execution runs",  # calls pools, with no flow around the call
    "bench.suites": "tasks",
    "cli": "errors extras author data graph trace check proof placement explain plan rewards checkpoints watch config binding runs "
           "memory memory.sizes watchdog bench durable algorithms environments services services.declare serving launching moving",
    "algorithms": "",
    "tasks.arithmetic": "data runs pretrained",
    "": "errors columns dispatch author clients",
}  # fmt: skip
VERSION = {("cli.main", ""), ("runs.prepare", ""), ("runs.depends", ""), ("runs.pools", ""), ("cluster.setup", ""),
           ("cluster.job.start", ""), ("cluster.job.member", "")}  # said, recorded
WITHIN_FUNCTIONS = {  # what a call needs and an import of the module must not load
    ("author.load", ""): "the names that rlflow exports, for the nearest",
}
# What several classes are called since one is there in place of another: protocols and what fulfils them, settings that a backend is asked
# for by name.
ALIKE = {"Trainer", "Generator", "TrainerSettings", "GeneratorSettings", "Settings", "Commit", "Workers"}


@cache
def modules() -> list[tuple[Path, str, ast.Module]]:
    """(path, module without ``rlflow.``, tree) of each file of the package."""
    return [(each.path, each.module.removeprefix("rlflow").removeprefix("."), each.tree) for each in sources(*PACKAGE)]


def layer(module: str) -> str:
    return next((name for name in sorted(MAY_IMPORT, key=len, reverse=True) if module == name or module.startswith(f"{name}.")), module)


@cache
def imports(tree: ast.Module) -> list[tuple[str, bool]]:
    """(name of what is imported, whether at module level) for each import outside ``if TYPE_CHECKING``."""
    return list(imports_below(tree, top=True))


def imports_below(node: ast.AST, top: bool) -> Iterator[tuple[str, bool]]:
    """Of the statements below a node, since nothing else holds an import."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from ((name, top) for name in imported(child))
        elif isinstance(child, ast.stmt | ast.excepthandler | ast.match_case) and not of_types_alone(child):
            yield from imports_below(child, top and not isinstance(child, ast.FunctionDef))


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """What a statement imports; of the package itself, modules are told from names that it exports."""
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
    """What a module imports although its layer may not, each in a sentence."""
    mine = layer(module)
    if mine not in MAY_IMPORT:
        yield f"{path} is in no layer"
        return
    for name, top in ours(tree):
        theirs = layer(name)
        if mine == theirs or theirs in MAY_IMPORT[mine].split() or (module, name) in VERSION:
            continue
        if mine == "algorithms":
            if name:
                yield f"{path}: an algorithm imports from rlflow alone, not rlflow.{name}"
        elif top:
            yield f"{path}: {mine or 'rlflow'} may not import rlflow.{name}"
        elif (module, name) not in WITHIN_FUNCTIONS:
            yield f"{path}: {mine or 'rlflow'} may not import rlflow.{name}, not even in a function"


def test_a_module_imports_what_its_layer_may():
    assert [sentence for module in modules() for sentence in refused(*module)] == []


@pytest.mark.parametrize(("module", "text", "sentence"), [
    ("novelty.parts", "", "novelty/parts.py is in no layer"),
    ("graph.model", "import rlflow.cluster.rpc.pool", "graph may not import rlflow.cluster.rpc.pool"),
    ("graph.model", "from rlflow import cluster", "graph may not import rlflow.cluster"),
    ("graph.model", "def draw():\n    from rlflow.execution import executor", "may not import rlflow.execution, not even in a function"),
    ("algorithms.ppo", "from rlflow.maths import gae", "an algorithm imports from rlflow alone, not rlflow.maths"),
])  # fmt: skip
def test_an_import_that_no_layer_may_have_is_named(module, text, sentence):
    [found] = refused(Path(*module.split(".")).with_suffix(".py"), module, ast.parse(text))
    assert found.endswith(sentence)


@pytest.mark.parametrize(("module", "text"), [
    ("graph.model", "import rlflow.columns\nimport rlflow.graph.wire\nimport torch"),
    ("graph.model", "if TYPE_CHECKING:\n    from rlflow.execution import executor"),
    ("author.load", "def call():\n    import rlflow"),
    ("algorithms.ppo", "from rlflow import flow, stage"),
])  # fmt: skip
def test_an_import_that_a_layer_may_have_is_not_named(module, text):
    assert list(refused(Path(module), module, ast.parse(text))) == []


def test_no_modules_of_runs_import_each_other_in_a_circle():
    """Neither while they load nor for their types."""
    names = {module for _, module, _ in modules() if layer(module) == "runs"}
    graph = nx.DiGraph()
    for _, module, tree in modules():
        for node in ast.walk(tree) if module in names else ():
            if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("rlflow.runs"):
                start = node.module.removeprefix("rlflow.")
                imported = [start, *(f"{start}.{alias.name}" for alias in node.names)]
                graph.add_edges_from((module, name) for name in imported if name in names)
    graph.remove_nodes_from(["runs"])
    assert graph.number_of_edges() > 50
    assert list(nx.simple_cycles(graph)) == []


def test_importing_the_package_needs_no_torch():
    calls_functions = {Path(f"rlflow/check/{name}.py") for name in ("losses", "influence", "stages")}  # loaded where a flow is right so far
    light = {"errors", "columns", "dispatch", "extras", "author", "graph", "trace", "check", ""}
    heavy = ("torch", "ray", "transformers", "datasets", "vllm", "deepspeed", "numpy")
    found = [(str(path), name) for path, module, tree in modules() if layer(module) in light and path not in calls_functions
             for name, top in imports(tree) if top and name.partition(".")[0] in heavy]  # fmt: skip
    assert found == []
    assert not [path for path, module, tree in modules() if layer(module) in light and path not in calls_functions
                for name, top in imports(tree) if top and name.startswith(("rlflow.check.losses", "rlflow.check.influence",
                                                                           "rlflow.check.stages"))]  # fmt: skip


def test_only_the_cluster_layer_imports_ray():
    """And other systems that it is compared with, which may be Ray itself."""
    found = [str(path) for path, module, tree in modules() if layer(module) not in ("cluster", "bench.peers")
             for name, _ in imports(tree) if name.partition(".")[0] == "ray"]  # fmt: skip
    assert found == []


def test_no_file_is_called_after_nothing():
    names = {path.stem for path, _, _ in modules()} | {path.parent.name for path, _, _ in modules()}
    assert not names & {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base", "core", "manager"}


def test_a_name_stands_for_one_class():
    """Comparisons have words of their own for what they measure."""
    places: dict[str, list[Path]] = {}
    for path, module, tree in modules():
        for node in tree.body if layer(module) not in ("algorithms", "bench") and not layer(module).startswith("bench.") else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path)
    assert {name: paths for name, paths in places.items() if len(paths) > 1 and name not in ALIKE} == {}
    assert [name for name in sorted(ALIKE) if len(places.get(name, [])) < 2 and name != "Settings"] == []


@cache
def calls(tree: ast.Module) -> list[tuple[ast.Call, str]]:
    """Each call, with the text of what is called."""
    return [(node, ast.unparse(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)]


def test_nothing_at_rest_is_a_pickle():
    pickling = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
    under_way = {("cluster.setup", "cloudpickle"), ("cluster.rpc.message", "cloudpickle"), ("cluster.rpc.replies", "cloudpickle")}
    found = [(str(path), name) for path, module, tree in modules() for name, _ in imports(tree)
             if name.partition(".")[0] in pickling and (module, name) not in under_way]  # fmt: skip
    found += [(str(path), called) for path, _, tree in modules() for _, called in calls(tree)
              if called in ("torch.save", "torch.load")]  # fmt: skip
    assert found == []


def test_text_becomes_code_only_where_a_users_file_is_loaded():
    found = {str(path) for path, _, tree in modules() for _, called in calls(tree) if called in ("eval", "exec", "builtins.exec")}
    # the text of a user's file, as the run read it at its start; what a model wrote, in a process that can only compute
    assert found == {"rlflow/rewards/scorers.py", "rlflow/environments/shipped/sandbox.py"}
    loads = {str(path) for path, _, tree in modules() for _, called in calls(tree) if called.endswith(".exec_module")}  # fmt: skip
    assert loads == {"rlflow/author/load.py", "rlflow/bench/child.py", "rlflow/extras.py"}  # a suite's systems; packages that are installed


def test_no_code_of_a_model_folder_is_run():
    found = [str(path) for path, _, tree in modules() for call, _ in calls(tree) for keyword in call.keywords
             if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"]  # fmt: skip
    assert found == []


def test_what_is_loaded_from_a_model_folder_says_that_it_runs_no_code():
    """Where nothing is said, transformers asks, and takes the answer from standard input."""
    found = [f"{path}:{call.lineno}" for path, _, tree in modules() for call, called in calls(tree)
             if isinstance(call.func, ast.Attribute) and call.func.attr in ("from_pretrained", "from_config")
             and called.startswith(("Auto", "kind"))
             and not any(keyword.arg in ("trust_remote_code", None) for keyword in call.keywords)]  # fmt: skip
    assert found == []
