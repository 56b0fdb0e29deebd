"""Threads are fixed, so that a test gives the same numbers on every machine."""

import torch

torch.set_num_threads(1)
