from rlflow.runs.bounds import Totals
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
    totals.add(SPANS, 9.5)
    totals.add(SPANS, 9.5)
    reward = totals.shares["reward"]
    assert (totals.seconds, reward.seconds, reward.critical, reward.calls) == (19.0, 10.0, 10.0, 2)
    assert totals.shares["values"].critical == 0.0
    assert [share.node for share in totals][:2] == ["reward", "generate"]


def test_nothing_ran_has_no_path():
    assert critical_path([]) == []
