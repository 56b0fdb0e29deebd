"""A run resolves each thing once: backend settings, headers of model folders, the placement of roles, and the
plan."""

import runpy

import pytest
from sources import ROOT, sources

from rlflow.author.load import load_flow
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.roles.bound import bind_roles
from rlflow.runs.planning import place_roles

ONCE = runpy.run_path(str(ROOT / "benchmarks" / "once.py"))
SETTINGS = {
    f"settings {role}.{half}": 1
    for role in ("actor", "critic", "reference")
    for half in ("trainer", "generator")
}


@pytest.mark.slow
def test_one_process_resolves_everything_once(tmp_path):
    driver, workers = ONCE["counted_run"](tmp_path)
    assert (driver, workers) == ({**SETTINGS, "layouts": 1, "passes": 1}, [])


@pytest.mark.long
def test_a_run_on_pools_resolves_everything_once_in_each_process(tmp_path):
    driver, workers = ONCE["counted_run"](tmp_path, pools="all=2")
    [headers] = [name for name in driver if name.startswith("headers ")]
    assert headers.endswith("arithmetic_model")
    assert driver == {**SETTINGS, headers: 1, "placement": 1, "layouts": 1, "passes": 1}
    assert workers == [SETTINGS] * 2


def package():
    """Return the files of the package, as the benchmark reads them."""
    return [(file.module, file.path, file.nodes) for file in sources("rlflow")]


@pytest.mark.slow
def test_few_functions_take_the_configuration_of_a_run():
    assert 0 < len(ONCE["takers"](package())) <= ONCE["MOST_FUNCTIONS"]


def test_no_code_finds_backend_features_by_name():
    assert {"row_exact", "generate_chunks", "pieces"} <= ONCE["optional"]()
    assert ONCE["probes"](package()) == []


def test_repeated_work_is_named():
    once = {"settings actor.trainer": 1, "passes": 1}
    assert ONCE["more_than_once"](once, [{"settings actor.trainer": 1}]) == []
    assert ONCE["more_than_once"]({**once, "passes": 2}, [{"layouts": 1}]) == [
        "driver: passes, 2 times",
        "worker: layouts",
    ]


def test_an_empty_pools_flag_removes_the_placement():
    """A fork drops the pools of its run with ``--pools ''``."""
    config = sort_values({"backend": "null", "pools": ""}, ["actor", "reward"])
    program = compile_flow(load_flow("grpo"))
    assert place_roles(program, bind_roles(program.graph, config), config).placement is None
