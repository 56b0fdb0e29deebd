"""How the ranks of a pool meet and communicate, given their placement."""

import multiprocessing
import os
import socket
import stat
import threading

import torch
import torch.distributed as dist

from rlflow.cluster import group
from rlflow.cluster.group import backend_of, exchange_texts
from rlflow.monitoring.doctor import addresses


def rank_that_meets(rank, rendezvous, pipe):
    """Meet the other ranks, in a process of its own. Reports the meeting point, if it is not given, and the
    result."""
    for name in (*group.INTERFACE_VARIABLES, "VLLM_HOST_IP"):
        os.environ.pop(name, None)
    if rendezvous is None and rank == 0:
        rendezvous = group.listen(group.LOOPBACK)
        pipe.send(rendezvous)
    group.join(rendezvous or pipe.recv(), rank, 2, "cpu", group.LOOPBACK)
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    beyond = [f"{host}:{port}" for host, port in addresses(os.getpid()) if not host.is_loopback]
    pipe.send([float(numbers), beyond, *(os.environ[name] for name in group.INTERFACE_VARIABLES)])
    dist.barrier()
    os._exit(0)


def ranks_that_meet(rendezvous):
    fork, ranks = multiprocessing.get_context("fork"), []  # importing torch takes seconds
    for rank in range(2):
        own, theirs = fork.Pipe()
        process = fork.Process(target=rank_that_meets, args=(rank, rendezvous, theirs))
        process.start()
        theirs.close()
        ranks.append((process, own))
    if rendezvous is None:
        ranks[1][1].send(ranks[0][1].recv())
    found = [own.recv() for _, own in ranks]
    for process, own in ranks:
        process.join(60)
        own.close()
        assert process.exitcode == 0
    return found


def test_ranks_meeting_at_an_address_listen_only_on_its_interface():
    assert ranks_that_meet(None) == [[3.0, [], "lo", "lo"]] * 2


def test_ranks_of_one_machine_meet_in_a_private_folder(tmp_path):
    rendezvous = tmp_path / "rlflow-run" / "all-0123" / "meeting"
    assert ranks_that_meet(str(rendezvous)) == [[3.0, [], "lo", "lo"]] * 2
    for folder in (rendezvous.parent, rendezvous.parents[1]):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700


def test_gpus_use_nccl_and_hosts_use_gloo():
    assert backend_of(["a 0", "a 1", "b 0"]) == "cpu:gloo,cuda:nccl"


def test_ranks_that_share_a_gpu_use_only_gloo():
    assert backend_of(["a 0", "a 1", "a 0"]) == "gloo"


def test_each_rank_receives_the_values_of_all_ranks():
    store, heard = dist.HashStore(), {}
    ranks = [
        threading.Thread(
            target=lambda rank=rank: heard.update({rank: exchange_texts(store, rank, 3, f"gpu {rank % 2}")})
        )
        for rank in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert heard == {rank: ["gpu 0", "gpu 1", "gpu 0"] for rank in range(3)}


def test_the_first_rank_listens_on_a_free_port_of_one_address():
    where = group.listen(group.LOOPBACK)
    (listening,) = group._listening
    with listening:
        assert where == f"127.0.0.1:{listening.getsockname()[1]}"
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    group._listening.clear()
