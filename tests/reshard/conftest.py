import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))  # strategies and workers are shared by the modules here


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small tensors; other processes have their turn."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
