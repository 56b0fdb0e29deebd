import gc
import os
import random
import socket
import struct
import sys

import numpy
import pytest
import torch

from rlflow.cluster.forking import fork_server


def test_a_fork_reseeds_libraries_and_reads_its_thread_limits(monkeypatch):
    before, threads = (torch.get_rng_state(), numpy.random.get_state()), torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    try:
        draws = []
        for _ in range(2):
            torch.manual_seed(7), numpy.random.seed(7), random.seed(7)
            fork_server.fresh_numbers()
            draws.append((torch.initial_seed(), float(torch.rand(())), numpy.random.rand()))
        assert all(one != other for one, other in zip(*draws, strict=True))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads), torch.set_rng_state(before[0]), numpy.random.set_state(before[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [["module_that_works"], ["module_that_is_not_there", "module_that_raises", "module_that_works"]]
)
def test_a_failing_import_does_not_prevent_other_imports(tmp_path, monkeypatch, names):
    (tmp_path / "module_that_works.py").write_text(
        "import os\nos.environ['IMPORTS'] = os.environ.get('IMPORTS', '') + 'x'\n"
    )
    (tmp_path / "module_that_raises.py").write_text("raise RuntimeError('no')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("IMPORTS", "")
    try:
        for _ in range(2):
            fork_server.import_all(names)
        assert os.environ["IMPORTS"] == "x"
    finally:
        sys.modules.pop("module_that_works", None)
        gc.unfreeze()


def test_the_peer_user_is_not_its_process_or_group():
    class Connection:
        def getsockopt(self, level, option, size):
            assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
            return struct.pack("3i", 11, 22, 33)[:size]

    assert fork_server.peer_user(Connection()) == 22
    one, other = socket.socketpair()
    with one, other:
        assert fork_server.peer_user(one) == os.geteuid()
