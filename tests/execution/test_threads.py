"""Model calls use all threads of torch, everything else uses one."""

import os
import threading

import pytest
import torch

from rlflow.execution.queues import Queues, all_for
from rlflow.training import threads


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def in_a_new_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


def test_a_queue_keeps_its_threads_while_other_code_has_one(two_threads):
    queues = Queues({"model": 1, "cpu": 1})
    with all_for(queues, "model"):
        assert queues.do("model", torch.get_num_threads) == 2
        assert queues.do("cpu", torch.get_num_threads) == 1
        assert torch.get_num_threads() == in_a_new_thread() == 1
    assert torch.get_num_threads() == in_a_new_thread() == 2
    assert queues.close()


def test_a_stage_leaves_no_threads_behind(two_threads):
    """Neither torch's division among threads nor MKL's."""
    queues, numbers = Queues({"model": 1, "cpu": 1}), torch.rand(768)
    with all_for(queues, "model"):
        queues.do("cpu", lambda: None)
        before = set(os.listdir("/proc/self/task"))
        queues.do("cpu", lambda: numbers.exp().outer(numbers).mm(numbers[:, None]))
        assert set(os.listdir("/proc/self/task")) <= before  # threads of earlier tests may end meanwhile
    assert queues.close()


def test_a_worker_computes_with_all_threads_in_its_main_thread(two_threads):
    threads.others_alone()
    assert torch.get_num_threads() == 2
    assert in_a_new_thread() == 1


def test_a_queue_passes_on_results_and_exceptions():
    queues = Queues({"model": 1})
    assert queues.do("model", lambda: threading.current_thread().name) == "model"
    assert queues.do("elsewhere", lambda: 3) == 3
    with pytest.raises(KeyError, match="gone"):
        queues.do("model", lambda: {}["gone"])
    assert queues.close()
