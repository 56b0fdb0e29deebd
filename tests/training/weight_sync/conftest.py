import pytest


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Use one thread: the tensors are small, and other processes need the cores."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
