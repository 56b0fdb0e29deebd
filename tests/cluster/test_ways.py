"""The means of moving weights between the ranks of a pool."""

import pytest

from rlflow.cluster.weights.same_ranks import first_that_opens, ways
from rlflow.errors import PlanError


@pytest.mark.parametrize(
    ("how", "device", "one_machine", "expected"),
    [
        ("auto", "cpu", True, ("segment",)),
        ("auto", "cuda", True, ("handles", "alltoall")),
        ("auto", "cpu", False, ("alltoall",)),
        ("auto", "cuda", False, ("alltoall",)),
        ("segment", "cpu", False, ("segment",)),
        ("segment", "cuda", True, ("handles",)),
        ("segment", "cuda", False, ("handles",)),
        ("alltoall", "cuda", True, ("alltoall",)),
        ("alltoall", "cpu", True, ("alltoall",)),
    ],
)
def test_memory_is_shared_on_one_machine_and_on_request(how, device, one_machine, expected):
    assert ways(how, device, one_machine) == expected


def refusing(code):
    def bound(way):
        if way == "handles":
            raise PlanError.of(code, "it cannot be", found="this", expected="that")
        return way

    return bound


def test_only_unshareable_memory_causes_another_way():
    assert first_that_opens(refusing("reshard-handles"), ("handles", "alltoall")) == "alltoall"
    for code, choices in (("reshard-machines", ("handles", "alltoall")), ("reshard-handles", ("handles",))):
        with pytest.raises(PlanError, match="it cannot be"):
            first_that_opens(refusing(code), choices)
