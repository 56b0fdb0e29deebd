import json

import pytest

from rlflow.runs.bounds import PATH, Totals
from rlflow.runs.report import bounded
from rlflow.spans import Span, critical_path

# generate ──▶ reward ─────▶ gae      reward is slow and beside logprobs;
#        └──▶ logprobs ──▶ values     values waits for its lane only
SPANS = [
    Span("generate", "model", 0.0, 4.0),
    Span("reward", "io", 4.0, 9.0, ("generate",)),
    Span("logprobs", "model", 4.0, 5.0, ("generate",)),
    Span("values", "model", 5.0, 7.0, ("generate",)),
    Span("gae", "cpu", 9.0, 9.5, ("reward", "values")),
]


def test_the_critical_path_is_the_chain_that_decided_the_end():
    assert [span.node for span in critical_path(SPANS)] == ["generate", "reward", "gae"]


def test_a_node_that_waited_for_its_lane_is_on_the_path():
    assert [span.node for span in critical_path(SPANS[:1] + SPANS[2:4])] == ["generate", "logprobs", "values"]


def test_totals_add_up_over_iterations():
    totals = Totals()
    totals.add(SPANS, 0.0, 9.5)
    totals.add(SPANS, 0.0, 9.5)
    reward = totals.shares["reward"]
    assert (totals.seconds, reward.seconds, reward.critical, reward.calls) == (19.0, 10.0, 10.0, 2)
    assert totals.shares["values"].critical == 0.0
    assert [share.node for share in totals][:2] == ["reward", "generate"]


def test_a_report_says_what_bounded_an_iteration():
    totals = Totals({"model": 1, "cpu": 2, "io": 8})
    for _ in range(2):
        totals.add(SPANS, 0.0, 10.0)
    found = totals.bounds
    assert (found.iterations, found.seconds, found.bound, found.by, found.outside) == (2, 10.0, 9.5, PATH, 0.5)
    assert found.critical == {"generate": 4.0, "reward": 5.0, "gae": 0.5}
    assert found.busy == pytest.approx({"model": 0.7, "cpu": 0.025, "io": 5 / 80})
    assert bounded(totals).splitlines()[-3:] == [
        "an iteration took 10.000 s; no schedule of its nodes takes less than 9.500 s: the longest path",
        "critical path: generate 4.000 s → reward 5.000 s → gae 0.500 s; 0.500 s outside nodes",
        "busy: model 70%, cpu 2%, io 6%"]


def test_a_lane_with_more_work_than_the_longest_path_is_the_bound():
    spans = [Span("a", "train", 0.0, 3.0), Span("b", "train", 3.0, 6.0), Span("c", "train.cpu", 6.0, 6.5, ("a", "b"))]
    totals = Totals({"train": 1, "train.cpu": 2, "train.io": 4, "rollout": 1})
    totals.add(spans, 0.0, 6.5)
    assert (totals.bounds.bound, totals.bounds.by, totals.bounds.path) == (6.0, "train", 3.5)
    told = totals.as_json()
    assert (told["bounded_by"], told["bound"], told["critical"][0]) == ("train", 6.0, {"node": "a", "seconds": 3.0})
    assert json.loads(json.dumps(told)) == told
    assert "busy: train 92%, train.cpu 4%, rollout 0%" in bounded(totals)  # a pool that did nothing is said, a side lane is not


def test_what_was_sampled_ahead_counts_for_the_time_in_which_it_was_waited_for():
    """Iteration 1 begins at 10. Its rows, sampled from 6 to 12, kept it waiting for 2 seconds; those that were there at 8 for none."""
    for end, waited in ((12.0, 2.0), (8.0, 0.0)):
        spans = [Span("generate", "rollout", 6.0, end), Span("update", "train", max(end, 10.0), 15.0, ("generate",))]
        totals = Totals({"train": 1, "rollout": 1}, staleness=1)
        totals.add(spans, 10.0, 5.0)
        assert totals.bounds.critical.get("generate", 0.0) == waited
        assert totals.bounds.outside == 0.0
    assert totals.bounds.path == 3.5  # 2 + 5 seconds, in which two iterations are under way
    assert (totals.bounds.bound, totals.bounds.by) == (5.0, "train")


def test_of_no_iteration_nothing_is_said():
    assert bounded(Totals()) == "no iteration was run to its end"
    assert Totals({"model": 1}).as_json()["bound"] == 0.0


def test_nothing_ran_has_no_path():
    assert critical_path([]) == []
