"""Numbers of the data that no dtype of a column has room for."""

import json
from contextlib import nullcontext

import pytest

from rlflow import PlanError, row
from rlflow.data import open_data


@pytest.mark.parametrize(
    ("value", "family", "answer"),
    [
        (2**63 - 1, "int", False), (2**63, "int", True), (-(2**63), "int", False), (-(2**63) - 1, "int", True),
        (2**127 - 1, "float", False), (2**127, "float", True), (-(2**127), "float", True), (1e300, "float", False),
    ],
)
def test_an_integer_may_be_too_large_for_its_column(tmp_path, value, family, answer):
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": "p", "number": value}) + "\n")
    with pytest.raises(PlanError, match="the field 'number' is") if answer else nullcontext():
        open_data(tmp_path / "data.jsonl", columns={"number": row({"int": "int64", "float": "float32"}[family])}).batch([0])
