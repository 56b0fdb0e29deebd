"""A pool over two nodes of a cluster: its ranks meet at an address, and the run equals that of one process. A
new node is used, and a lost node is named."""

import json
import re
import time
from types import SimpleNamespace

import pytest

import rlflow
from rlflow import PlanError

SMALL = {"backend": "null", "prompts": 6, "iterations": 2, "hp.samples": 2, "hp.max_tokens": 8}
SECONDS = 120.0
GATE = f"""
import time
from pathlib import Path

HERE = Path(__file__).parent

def gate(completion):
    "Says that it is there, and scores nothing before the file 'go' is."
    (HERE / "there").touch()
    limit = time.monotonic() + {SECONDS}
    while not (HERE / "go").exists() and time.monotonic() < limit:
        time.sleep(0.02)
    return 1.0
"""
TIMES = ("seconds", "response/tokens_per_second")


@pytest.fixture(scope="module")
def two_nodes():
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20},
    )
    cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
    yield cluster.address
    cluster.shutdown()


def reported(result):
    lines = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMES} for line in lines]


@pytest.mark.slow
def test_a_pool_spans_two_nodes(tmp_path, two_nodes):
    here = reported(rlflow.run("grpo", out=str(tmp_path / "here"), **SMALL))
    there = reported(
        rlflow.run("grpo", out=str(tmp_path / "there"), pools="all=2", ray_address=two_nodes, **SMALL)
    )
    assert [line.keys() for line in there] == [line.keys() for line in here]
    for one, other in zip(here, there, strict=True):
        assert other == pytest.approx(one, rel=1e-6, nan_ok=True)


@pytest.mark.slow
def test_a_too_small_cluster_reports_what_is_missing(tmp_path, two_nodes):
    with pytest.raises(PlanError, match="the pools need 3 CPUs") as refused:
        rlflow.run("grpo", out=str(tmp_path), pools="train=2,rollout=1", ray_address=two_nodes, **SMALL)
    assert "2 in the cluster" in str(refused.value)


@pytest.fixture
def growing():
    """A cluster with one node of one processor that this process is connected to."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20},
    )
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def until(condition, *processes):
    limit = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < limit
        for process in processes:
            assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


@pytest.mark.long
def test_a_new_node_is_used_and_a_lost_node_ends_only_its_run(tmp_path, growing, launch):
    from ray.util.placement_group import placement_group_table

    folders, runs = (tmp_path / "stays", tmp_path / "goes"), []
    for folder in folders:
        folder.mkdir()
        (folder / "gate.py").write_text(GATE)
        runs.append(
            launch(
                "grpo",
                pools="all=1",
                ray_address=growing.address,
                reward=f"{folder}/gate.py:gate",
                reward_write=folder,
                out=folder,
                **SMALL,
            )
        )
        if len(runs) == 1:
            until((folder / "there").exists, *runs)  # it uses the only processor
    until(lambda: any(group["state"] == "PENDING" for group in placement_group_table().values()), *runs)
    node = growing.add_node(num_cpus=1, object_store_memory=128 << 20)
    until((folders[1] / "there").exists, *runs)
    growing.remove_node(node, allow_graceful=False)

    said, _ = runs[1].communicate(timeout=SECONDS)
    assert runs[1].returncode == 1
    # The stages that do not wait for the rewards run concurrently with them; the error names the one that the
    # lost workers were running.
    assert re.search(
        r"stage '\w+' failed in iteration 0 .*rank 0 of pool 'all' \(pid \d+ on .*, node "
        rf"{node.node_id[:8]}, actor\)",
        said,
    ), said
    (folders[0] / "go").touch()
    said, _ = runs[0].communicate(timeout=SECONDS)
    assert runs[0].returncode == 0, said


@pytest.mark.long
def test_a_run_waits_for_a_new_machine_and_resumes_itself(tmp_path, launch):
    from ray.cluster_utils import Cluster

    (tmp_path / "gate.py").write_text(GATE)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False, "object_store_memory": 128 << 20},
    )
    try:
        node = cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
        run = launch(
            "grpo",
            pools="all=2",
            ray_address=cluster.address,
            reward=f"{tmp_path}/gate.py:gate",
            reward_write=tmp_path,
            wait_for_nodes=SECONDS,
            out=tmp_path / "runs",
            **SMALL,
        )
        until((tmp_path / "there").exists, run)
        cluster.remove_node(node, allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=128 << 20)
        (tmp_path / "go").touch()
        said, _ = run.communicate(timeout=2 * SECONDS)
        assert run.returncode == 0, said
    finally:
        cluster.shutdown()
    (folder,) = (tmp_path / "runs").iterdir()
    whole = rlflow.run(
        "grpo",
        reward=f"{tmp_path}/gate.py:gate",
        reward_write=str(tmp_path),
        out=str(tmp_path / "whole"),
        **SMALL,
    )
    for one, other in zip(reported(whole), reported(SimpleNamespace(folder=folder)), strict=True):
        assert other == pytest.approx(one, rel=1e-6, nan_ok=True)
