"""The device of a run whose workers may see other devices than its driver."""

import pytest

from rlflow.config.flags import sort_values
from rlflow.config.roles.backends import device_of
from rlflow.runs.pools import worker_setups


@pytest.mark.parametrize("asked", ["auto", "cpu"])
def test_workers_use_the_device_that_the_driver_found(asked):
    config = sort_values({"device": asked, "prompts": 3}, [])
    options = worker_setups(None, config, None, None, {}).config.options
    assert (options.device, options.prompts, config.options.device) == (device_of(asked), 3, asked)


def test_a_requested_gpu_need_not_be_on_this_machine():
    assert (
        worker_setups(None, sort_values({"device": "cuda"}, []), None, None, {}).config.options.device
        == "cuda"
    )
