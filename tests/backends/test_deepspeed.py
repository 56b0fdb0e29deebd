"""What the deepspeed trainer does beside the contract, on two ranks (``own_deepspeed.py``), and how it
starts."""

import sys

import pytest

from rlflow.backends import deepspeed
from rlflow.errors import PlanError
from rlflow.training.protocols import ModelSpec

BARS = "Loading weights:", "Writing model shards:"
CHECKS = ["nothing_stays_together", "frozen", "low", "low_adapters", "sleep_frees_what_is_planned_for_it"]


@pytest.mark.long
@pytest.mark.timeout(900)
def test_its_own_checks_hold(judged, subtests):
    judged.hold(subtests, "deepspeed", 2, CHECKS)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "ranks", [pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.long)]
)
def test_it_starts_and_ends_without_a_word_and_compiles_nothing(judged, ranks):
    """Models are loaded, and written, with bars of transformers'; bindings of triton speak as Python ends."""
    lines = [
        line
        for text in judged.said("deepspeed", ranks, "printed")
        for line in text.partition("nanobind: leaked")[0].splitlines()
    ]
    assert [line for line in lines if line.strip() and not line.startswith(BARS)] == []
    assert judged.said("deepspeed", ranks, "compiled") == [""] * ranks


def test_without_the_package_the_remedy_is_said(folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(PlanError, match=r"pip install --no-build-isolation 'rlflow-dag\[deepspeed\]'"):
        deepspeed.Trainer(ModelSpec(folders["llama"]))
