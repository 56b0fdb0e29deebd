"""The placement of a job's ranks."""

from rlflow.cluster.job.job_start import _nodes_for
from rlflow.cluster.job.rank_layout import Layout, Need


def test_ranks_without_a_fixed_place_get_no_nodes():
    bundle = Need(1, 0)
    assert _nodes_for(Layout({"actor": bundle}, bundle, 2, None)) == []
