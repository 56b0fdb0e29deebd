"""The place of a rank, and the error outside of ranks."""

import os

import pytest

from rlflow import FlowError
from rlflow.cluster.job import here as module
from rlflow.cluster.job.here import Here, here, settle
from rlflow.cluster.job.job_start import seated

ALL = Here("mine", "actor", 0, 3, 0, 0, 0, 0, "10.0.0.1:29500")


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(module, "_here", [])
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_local_ranks_count_per_node_and_nodes_in_rank_order():
    places = seated(ALL, ["b", "a", "b"])
    assert [
        (place.rank, place.local_rank, place.local_ranks, place.node, place.nodes) for place in places
    ] == [(0, 0, 2, 0, 2), (1, 0, 1, 1, 2), (2, 1, 2, 0, 2)]
    assert {place.meeting for place in places} == {"10.0.0.1:29500"}


def test_outside_a_rank_there_is_no_place(alone):
    with pytest.raises(FlowError, match="called outside of a job's ranks") as refused:
        here()
    assert "test_here.py" in str(refused.value)


def test_a_rank_has_the_variables_that_torchrun_sets(alone):
    place = seated(ALL, ["b", "a", "b"])[2]
    settle(place, distributed=True)
    assert here() is place
    names = (
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    assert [os.environ[name] for name in names] == ["2", "3", "1", "2", "0", "10.0.0.1", "29500"]
