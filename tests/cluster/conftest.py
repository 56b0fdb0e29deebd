"""One Ray for all tests of a session; each run joins it and leaves."""

import os

import pytest

os.environ["RAY_AUTH_MODE"] = "token"  # as a Ray that a run starts has it; read when Ray is imported


@pytest.fixture(scope="session")
def ray_address():
    from ray.cluster_utils import Cluster

    from rlflow.cluster.launch import guard_token

    guard_token()
    cluster = Cluster(initialize_head=True, head_node_args={
        "num_cpus": 8, "include_dashboard": False, "object_store_memory": 256 << 20})
    yield cluster.address
    cluster.shutdown()
    os.environ.pop("RAY_ADDRESS", None)
