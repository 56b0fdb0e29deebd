"""The environment of an engine's start: afterwards it is restored."""

import os
from unittest.mock import patch

import pytest
import torch

from rlflow.backends.vllm.surroundings import prepared


def failing(device):
    """Make an engine that leaves things behind and fails."""
    with prepared(device, VLLM_OWN="1"):
        os.environ.update({"LD_PRELOAD": "within", "LEFT_BEHIND": "1"})
        torch.set_num_threads = None
        raise RuntimeError("made")


def test_leftovers_of_an_engine_are_removed_except_its_variables():
    threads = torch.set_num_threads
    with patch.dict(os.environ, {"LD_PRELOAD": "before"}):
        with pytest.raises(RuntimeError, match="made"):
            failing("cpu")
        assert (os.environ["LD_PRELOAD"], os.environ["VLLM_OWN"]) == ("before", "1")
        assert "LEFT_BEHIND" not in os.environ
    assert torch.set_num_threads is threads
