import textwrap
from pathlib import Path

import pytest

from rlflow.benchmarks.cells import compile_cells
from rlflow.benchmarks.runner import Runner
from rlflow.benchmarks.suite import read_suite
from rlflow.compiler.trace.compile import TraceOptions

COUNTING = Path(__file__).parent / "counting.py"


@pytest.fixture
def suite(tmp_path):
    """Return a function that reads a suite from its text; SYSTEM stands for the counting system's path."""

    def write(text, name="suite"):
        path = tmp_path / f"{name}.toml"
        path.write_text(textwrap.dedent(text).replace("SYSTEM", str(COUNTING)))
        return read_suite(path)

    return write


@pytest.fixture
def bench(tmp_path):
    """Return a function that runs a suite.

    It returns whether the suite is complete, the progress lines, and the key of each cell.
    """

    def run(suite, folder="out", decided=lambda measured: False, budget=None):
        (tmp_path / folder).mkdir(exist_ok=True)
        lines = []
        cells = compile_cells(suite, lambda config: TraceOptions())
        complete = Runner(suite, cells, tmp_path / folder, lines.append, decided, budget).run()
        return complete, lines, {cell.cell.name: cell.key for cell in cells}

    return run
