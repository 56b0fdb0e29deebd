"""Where the ranks of a job are started."""

from rlflow.cluster.job.job_start import _nodes_for
from rlflow.cluster.job.rank_layout import Layout, Need


def test_ranks_that_may_be_anywhere_have_no_nodes_of_their_own():
    bundle = Need(1, 0)
    assert _nodes_for(Layout({"actor": bundle}, bundle, 2, None)) == []
