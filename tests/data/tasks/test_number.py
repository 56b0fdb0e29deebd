"""The second reward of the packaged sums."""

import pytest

from rlflow.data.tasks.number import number


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("12", 1.0),
        (" -7\n", 1.0),
        ("0", 1.0),
        ("--7", 0.0),
        ("", 0.0),
        ("-", 0.0),
        ("1 2", 0.0),
        ("12=", 0.0),
        ("1.5", 0.0),
    ],
)
def test_a_number_is_digits_with_a_sign(completion, score):
    assert number(completion) == score
