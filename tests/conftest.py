"""Threads are fixed, so that a test gives the same numbers on every machine; and how long a property takes to draw decides nothing."""

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")
