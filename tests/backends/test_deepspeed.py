"""The deepspeed trainer beyond the contract, on two ranks (``own_deepspeed.py``), and its start."""

import sys

import pytest

from rlflow.backends import deepspeed
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

BARS = "Loading weights:", "Writing model shards:"
CHECKS = [
    "ranks_keep_only_their_part",
    "frozen",
    "follows",
    "low",
    "low_adapters",
    "sleep_frees_the_planned_bytes",
]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_its_own_checks_pass(checked, subtests):
    checked.check(subtests, "deepspeed", 2, CHECKS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_it_prints_nothing_and_compiles_nothing(checked, ranks):
    """Except the progress bars of transformers while models are loaded and saved, and triton's bindings at
    the end of Python.
    """
    lines = [
        line
        for text in checked.failures("deepspeed", ranks, "printed")
        for line in text.partition("nanobind: leaked")[0].splitlines()
    ]
    assert [line for line in lines if line.strip() and not line.startswith(BARS)] == []
    assert checked.failures("deepspeed", ranks, "compiled") == [""] * ranks


def test_a_missing_package_is_reported_with_a_remedy(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(PlanError, match=r"pip install --no-build-isolation 'rlflow-dag\[deepspeed\]'"):
        deepspeed.Trainer(ModelSpec(folders["llama"]))
