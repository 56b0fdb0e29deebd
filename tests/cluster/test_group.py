"""How the ranks of a pool talk: by what lies where."""

import threading

import torch.distributed as dist

from rlflow.cluster.group import backend_of, told


def test_gpus_talk_by_nccl_and_their_hosts_by_gloo():
    assert backend_of(["a 0", "a 1", "b 0"]) == "cpu:gloo,cuda:nccl"


def test_ranks_that_share_a_gpu_talk_by_gloo_alone():
    assert backend_of(["a 0", "a 1", "a 0"]) == "gloo"


def test_each_rank_hears_what_all_of_them_tell():
    store, heard = dist.HashStore(), {}
    ranks = [threading.Thread(target=lambda rank=rank: heard.update({rank: told(store, rank, 3, f"gpu {rank % 2}")})) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(30)
    assert heard == {rank: ["gpu 0", "gpu 1", "gpu 0"] for rank in range(3)}
