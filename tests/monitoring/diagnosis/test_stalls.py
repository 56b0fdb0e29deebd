"""Stalls planted into real runs are named first. These are two of `python benchmarks/stalls.py`; its table
has the others."""

import importlib.util

import pytest
from sources import ROOT

pytestmark = pytest.mark.long
PATH = ROOT / "benchmarks" / "stalls.py"


@pytest.fixture(scope="module")
def stalls():
    specification = importlib.util.spec_from_file_location("stalls_command", PATH)
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PATH.parent))
        patch.setitem(__import__("sys").modules, "stalls_command", module)  # dataclasses look up their module
        specification.loader.exec_module(module)
        yield module


@pytest.mark.parametrize("name", ["unsynchronised", "length-cap"])
def test_a_planted_stall_is_named_first(stalls, name, tmp_path):
    cell = next(cell for cell in stalls.cells([1], [name], [0]) if cell.algorithm == "grpo")
    stalls.measure(cell, tmp_path)
    assert stalls.named(tmp_path / cell.name)[0] == name
