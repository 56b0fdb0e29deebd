"""Threads are fixed, so that a test gives the same numbers on every machine; and how long a property takes to draw decides nothing."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, too; read when torch is imported

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

sys.path.insert(0, str(Path(__file__).parent))  # for what tests of several folders share
torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that of several processes none waits long for another in the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests run in one process; so do those of a backend whose ranks are started once for several files."""
    from xdist.scheduler import LoadFileScheduling

    class ByBackend(LoadFileScheduling):
        def _split_scope(self, nodeid):
            found = re.search(r"backends/test_(?:contract\.py.*\[)?(fsdp|local|null|deepspeed|vllm)\b", nodeid)
            name = found and ("fsdp" if found[1] in ("local", "null") else found[1])  # these three share their processes
            return f"backend {name}" if name else super()._split_scope(nodeid)

    return ByBackend(config, log) if config.getvalue("dist") == "loadfile" else None
