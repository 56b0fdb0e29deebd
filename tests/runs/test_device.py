"""Which device a run has, where its workers may see others than its driver."""

import pytest

from rlflow.binding.backends import device_of
from rlflow.config.flags import sorted_out
from rlflow.memory.footprint import decided


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_workers_are_told_what_the_driver_found(asked):
    given = sorted_out({"device": asked, "prompts": 3}, [])
    assert decided(given).options.device == device_of(asked)
    assert (decided(given).options.prompts, given.options.device) == (3, asked)


def test_a_gpu_that_was_asked_for_need_not_be_here():
    assert decided(sorted_out({"device": "cuda"}, [])).options.device == "cuda"
