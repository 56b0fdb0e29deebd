"""Numbers of the data that no dtype of a column has room for."""

import pytest

from rlflow.data.fields import _too_large


@pytest.mark.parametrize(
    ("value", "family", "answer"),
    [
        (2**63 - 1, "int", False), (2**63, "int", True), (-(2**63), "int", False), (-(2**63) - 1, "int", True),
        (2**127 - 1, "float", False), (2**127, "float", True), (-(2**127), "float", True), (1e300, "float", False),
    ],
)
def test_an_integer_may_be_too_large_for_its_column(value, family, answer):
    assert _too_large(value, family) is answer
