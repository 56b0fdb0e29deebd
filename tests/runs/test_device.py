"""Which device a run has, where its workers may see others than its driver."""

import pytest

from rlflow.config.flags import sort_values
from rlflow.config.roles.backends import device_of
from rlflow.runs.pools import worker_setups


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_workers_are_told_what_the_driver_found(asked):
    config = sort_values({"device": asked, "prompts": 3}, [])
    options = worker_setups(None, config, None, None, {}).config.options
    assert (options.device, options.prompts, config.options.device) == (device_of(asked), 3, asked)


def test_a_gpu_that_was_asked_for_need_not_be_here():
    assert (
        worker_setups(None, sort_values({"device": "cuda"}, []), None, None, {}).config.options.device
        == "cuda"
    )
