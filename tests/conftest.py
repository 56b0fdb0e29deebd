"""Threads are fixed, so that a test gives the same numbers on every machine; and how long a property takes to draw decides nothing."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # of processes that tests start, too; read when torch is imported

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")


def pytest_collection_modifyitems(items):
    """Files with slow tests first, so that of several processes none waits long for another in the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
