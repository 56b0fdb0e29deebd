"""A pool over two nodes of a cluster: its ranks meet at an address, and the run is the one of a single process."""

import json

import pytest

import rlflow
from rlflow import PlanError

SMALL = {"backend": "null", "prompts": 6, "iterations": 2, "hp.samples": 2, "hp.max_tokens": 8}
TIMES = ("seconds", "response/tokens_per_second")


@pytest.fixture(scope="module")
def two_nodes():
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20})
    cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
    yield cluster.address
    cluster.shutdown()


def told(result):
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.slow
def test_a_pool_spans_two_nodes(tmp_path, two_nodes):
    here = told(rlflow.run("grpo", out=str(tmp_path / "here"), **SMALL))
    there = told(rlflow.run("grpo", out=str(tmp_path / "there"), pools="all=2", ray_address=two_nodes, **SMALL))
    assert [line.keys() for line in there] == [line.keys() for line in here]
    for one, other in zip(here, there, strict=True):
        assert other == pytest.approx(one, rel=1e-6, nan_ok=True)


@pytest.mark.slow
def test_a_cluster_without_room_says_what_is_missing(tmp_path, two_nodes):
    with pytest.raises(PlanError, match="the pools need 3 CPUs") as refused:
        rlflow.run("grpo", out=str(tmp_path), pools="train=2,rollout=1", ray_address=two_nodes, **SMALL)
    assert "2 in the cluster" in str(refused.value)
