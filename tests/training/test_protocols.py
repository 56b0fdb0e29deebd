"""Rows must have the recorded lengths; otherwise the error names the generator."""

import pytest

from rlflow.author.batch import Batch
from rlflow.training.protocols import Sampling, as_long


def rows(*lengths):
    return Batch.of(tokens=[[1] * length for length in lengths])


def test_rows_of_recorded_lengths_pass_and_others_are_refused():
    sampling = Sampling(lengths=(2, 3))
    assert len(as_long(rows(2, 3, 2), sampling)) == 3
    with pytest.raises(
        ValueError,
        match=r"found rows of \[2, 2, 2\] tokens, expected the lengths of the recorded list: \[2, 3, 2\]",
    ):
        as_long(rows(2, 2, 2), sampling)
    assert len(as_long(rows(9), Sampling())) == 1
