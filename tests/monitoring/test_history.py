"""The reader of a run's files, for any content."""

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rlflow.monitoring.history import History, is_number, stage_seconds


@pytest.mark.parametrize("value", [10**400, -(10**400), 1 << 1024], ids=["large", "small", "just"])
def test_a_metric_that_does_not_fit_a_float_is_skipped(value):
    history = History()
    history.add(json.dumps({"iteration": 3, "reward/mean": value, "loss": 0.5, "rows": 1 << 1000}).encode())
    assert history.iterations == [(3, {"loss": 0.5, "rows": float(1 << 1000)})]
    assert history.damaged == 0


@pytest.mark.parametrize("value", [True, "1", None, [1]])
def test_values_that_are_not_numbers_become_none(value):
    assert not is_number(value)


@given(st.integers(-(1 << 1026), 1 << 1026))
@example((1 << 1024) - 1)
@example(-(1 << 1024) + 1)
@example((1 << 1023) - 1)
def test_accepted_numbers_fit_into_a_float(value):
    if is_number(value):
        float(value)
    assert is_number(value) or abs(value) >= 1 << 1023


def test_nodes_have_the_seconds_of_the_last_iteration(tmp_path):
    events = [("a", 0, 9e6), ("a", 1, 2_500_000), ("b", 1, 500_000), ("a", 1, 500_000)]
    lines = [
        json.dumps({"name": name, "ph": "X", "dur": dur, "args": {"iteration": number}})
        for name, number, dur in events
    ]
    (tmp_path / "timeline.json").write_text("[{}\n," + "\n,".join(lines) + "\n")
    assert stage_seconds(tmp_path) == {"a": 3.0, "b": 0.5}
