"""Bytes between processes are counted by kind, each once."""

from rlflow.cluster.calls import Traffic


def test_each_byte_is_counted_once():
    traffic = Traffic()
    traffic.add("columns", 3)
    traffic.add("columns", 4)
    traffic.add("commits", 5)
    assert traffic.take() == {"columns": 7, "weights": 0, "commits": 5}
    assert traffic.take() == {"columns": 0, "weights": 0, "commits": 0}
