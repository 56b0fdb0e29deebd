"""The flag that an error points to."""

import errno

import pytest

from rlflow.rewards import hints


@pytest.mark.parametrize(
    ("error", "flag"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), "--reward-network"),
        (PermissionError(errno.EACCES, "Permission denied", "out.txt"), "--reward-write"),
        (PermissionError(errno.EPERM, "Operation not permitted"), ""),  # of os.kill
        (ValueError("no number"), ""),
    ],
)
def test_a_sandbox_error_names_the_flag_that_allows_it(error, flag):
    assert flag in hints.hint(error)
    assert bool(flag) == bool(hints.hint(error))
