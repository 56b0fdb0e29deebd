"""One Ray for all tests of a session; each run joins and leaves it."""

import os
import subprocess
import sys

import pytest


@pytest.fixture(scope="session")
def ray_address():
    from ray.cluster_utils import Cluster

    from rlflow.cluster import token

    token.guard()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 8, "include_dashboard": False, "object_store_memory": 256 << 20},
    )
    yield cluster.address
    cluster.shutdown()
    os.environ.pop("RAY_ADDRESS", None)


@pytest.fixture
def launch(tmp_path):
    """Start `rlflow run FLOW --FLAG VALUE …` as a process of its own. The fixture kills the remains of the
    run at the end."""
    started = []

    def start(flow, **flags):
        words = [
            word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        command = [sys.executable, "-m", "rlflow.cli.main", "run", flow, "--quiet", *words]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
