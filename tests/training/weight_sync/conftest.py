import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Small tensors; other processes have their turn."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
