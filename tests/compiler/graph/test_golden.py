"""Golden graphs: the compiled graph of each shipped algorithm.

RLFLOW_WRITE_GOLDEN=1 rewrites the files; review the difference.
"""

import os
from pathlib import Path

import pytest

from rlflow.author.load import algorithms_folder, load_flow
from rlflow.compiler.trace.compile import compile_flow

GOLDEN = Path(__file__).parent / "golden"
ALGORITHMS = sorted(path.stem for path in algorithms_folder().glob("*.py") if path.stem != "__init__")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_compiles_to_its_golden_graph(name):
    path = GOLDEN / f"{name}.txt"
    found = f"{compile_flow(load_flow(name)).graph}\n"
    if os.environ.get("RLFLOW_WRITE_GOLDEN"):
        path.write_text(found)
    assert path.is_file(), f"no golden graph of {name}: run this test with RLFLOW_WRITE_GOLDEN=1"
    assert found == path.read_text()


def test_every_golden_graph_has_its_algorithm():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(ALGORITHMS)
