"""Where nodes run by what they read: how many bytes a row of a column is taken for."""

import pytest

from rlflow.columns import row, text, token
from rlflow.placement import typical_bytes


def test_a_column_of_unknown_kind_counts_as_a_number_for_each_row():
    assert typical_bytes(None) == typical_bytes(row("float32")) == 4


@pytest.mark.parametrize(("heavy", "light"), [(row("int64"), row("float32")), (row("float32"), row("bool")), (token("float32"), text),
                                              (text, row("int64"))])  # fmt: skip
def test_what_has_more_bytes_as_a_rule_counts_for_more(heavy, light):
    assert typical_bytes(heavy) > typical_bytes(light) > 0
