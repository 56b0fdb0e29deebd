import dataclasses
import json
from itertools import pairwise, permutations

import pytest

import rlflow
from rlflow.author.load import load_flow
from rlflow.compiler.passes import plan
from rlflow.compiler.spans import Span, critical_path
from rlflow.compiler.trace.compile import compile_flow
from rlflow.runs.bounds import PATH, RunTotals
from rlflow.runs.final import bounds_text

# generate ──▶ reward ─────▶ gae      reward is slow and runs next to logprobs;
# └──▶ logprobs ──▶ values     values waits for its queue only
SPANS = [
    Span("generate", "model", 0.0, 4.0),
    Span("reward", "io", 4.0, 9.0, ("generate",)),
    Span("logprobs", "model", 4.0, 5.0, ("generate",)),
    Span("values", "model", 5.0, 7.0, ("generate",)),
    Span("gae", "cpu", 9.0, 9.5, ("reward", "values")),
]


def test_the_critical_path_is_the_chain_that_set_the_end():
    assert [span.node for span in critical_path(SPANS)] == ["generate", "reward", "gae"]


def test_a_node_that_waited_for_its_queue_is_on_the_path():
    assert [span.node for span in critical_path(SPANS[:1] + SPANS[2:4])] == ["generate", "logprobs", "values"]


def test_totals_add_up_over_iterations():
    totals = RunTotals()
    totals.add(SPANS, 0.0, 9.5)
    totals.add(SPANS, 0.0, 9.5)
    reward = totals.shares["reward"]
    assert (totals.seconds, reward.seconds, reward.critical, reward.calls) == (19.0, 10.0, 10.0, 2)
    assert totals.shares["values"].critical == 0.0
    assert [share.node for share in totals][:2] == ["reward", "generate"]


def test_a_report_names_the_bound_of_an_iteration():
    totals = RunTotals({"model": 1, "cpu": 2, "io": 8})
    for _ in range(2):
        totals.add(SPANS, 0.0, 10.0)
    found = totals.bounds
    assert (found.iterations, found.seconds, found.bound, found.by, found.outside) == (
        2,
        10.0,
        9.5,
        PATH,
        0.5,
    )
    assert found.critical == {"generate": 4.0, "reward": 5.0, "gae": 0.5}
    assert found.busy == pytest.approx({"model": 0.7, "cpu": 0.025, "io": 5 / 80})
    rows = [
        [cell.strip() for cell in line.strip("│┃").replace("┃", "│").split("│")]
        for line in bounds_text(totals).splitlines()[:-3]
    ]
    assert [row for row in rows if len(row) == 5] == [
        ["node", "calls", "seconds", "share", "on the critical path"],
        ["reward", "2", "10.00", "35%", "50%"],
        ["generate", "2", "8.00", "40%", "40%"],
        ["values", "2", "4.00", "10%", "0%"],
        ["logprobs", "2", "2.00", "5%", "0%"],
        ["gae", "2", "1.00", "5%", "5%"],
    ]
    assert bounds_text(totals).splitlines()[-3:] == [
        "an iteration took 10.000 s; any schedule of its nodes takes at least 9.500 s: the longest path",
        "critical path: generate 4.000 s → reward 5.000 s → gae 0.500 s; 0.500 s outside nodes",
        "busy: models 70%, stages 2%, rewards 6%",
    ]


def test_a_queue_with_more_work_than_the_longest_path_is_the_bound():
    spans = [
        Span("a", "train", 0.0, 3.0),
        Span("b", "train", 3.0, 6.0),
        Span("c", "train.cpu", 6.0, 6.5, ("a", "b")),
    ]
    totals = RunTotals({"train": 1, "train.cpu": 2, "train.io": 4, "rollout": 1})
    totals.add(spans, 0.0, 6.5)
    assert (totals.bounds.bound, totals.bounds.by, totals.bounds.path) == (6.0, "train", 3.5)
    told = totals.as_json()
    assert (told["bounded_by"], told["bound"], told["critical"][0]) == (
        "train",
        6.0,
        {"node": "a", "seconds": 3.0},
    )
    assert json.loads(json.dumps(told)) == told
    # an idle pool is reported, an idle side queue is not
    assert "busy: train models 92%, train stages 4%, rollout models 0%" in bounds_text(totals)


def test_look_ahead_sampling_counts_only_while_it_is_awaited():
    """Iteration 1 begins at 10. Its rows, sampled from 6 to 12, delay it by 2 seconds; the rows ready at 8 do
    not."""
    for end, waited in ((12.0, 2.0), (8.0, 0.0)):
        spans = [
            Span("generate", "rollout", 6.0, end),
            Span("update", "train", max(end, 10.0), 15.0, ("generate",)),
        ]
        totals = RunTotals({"train": 1, "rollout": 1}, staleness=1)
        totals.add(spans, 10.0, 5.0)
        assert totals.bounds.critical.get("generate", 0.0) == waited
        assert totals.bounds.outside == 0.0
    assert totals.bounds.path == 3.5  # 2 + 5 seconds, during which two iterations run
    assert (totals.bounds.bound, totals.bounds.by) == (5.0, "train")


# attempt [0, 10]: twice generate ──▶ reward ──▶ keep, with a second before, between and after; then logprobs
# ──▶ update
TRIES = [
    Span("generate", "model", 1.0, 4.0),
    Span("reward", "io", 4.0, 5.0, ("generate",)),
    Span("keep", "cpu", 5.0, 5.0625, ("reward",)),
    Span("generate", "model", 6.0, 7.0),
    Span("reward", "io", 7.0, 9.0, ("generate",)),
    Span("keep", "cpu", 9.0, 9.0625, ("reward",)),
    Span("attempt", "control", 0.0, 10.0, ("prompts",)),
    Span("logprobs", "model", 10.0, 12.0, ("attempt",)),
    Span("update", "model", 12.0, 16.0, ("logprobs",)),
]


def test_a_node_inside_a_repeat_is_not_counted_twice():
    totals = RunTotals(
        {"model": 1, "io": 8, "cpu": 2}, within=dict.fromkeys(("generate", "reward", "keep"), "attempt")
    )
    totals.add(TRIES, 0.0, 20.0)
    assert {share.node: (share.seconds, share.part, share.critical) for share in totals} == {
        "update": (4.0, 4.0, 4.0),
        "generate": (4.0, 4.0, 4.0),
        "attempt": (2.875, 2.875, 2.875),
        "reward": (3.0, 3.0, 3.0),
        "logprobs": (2.0, 2.0, 2.0),
        "keep": (0.125, 0.125, 0.125),
    }
    assert totals.shares["attempt"].calls == 1
    assert totals.shares["generate"].calls == 2
    found = totals.bounds
    assert list(found.critical.items()) == [
        ("generate", 4.0),
        ("reward", 3.0),
        ("keep", 0.125),
        ("attempt", 2.875),
        ("logprobs", 2.0),
        ("update", 4.0),
    ]
    assert (found.outside, found.path) == (4.0, 16.0)
    assert bounds_text(totals).splitlines()[-2] == (
        "critical path: generate 4.000 s → reward 3.000 s → … → attempt 2.875 s → logprobs 2.000 s → "
        "update 4.000 s; 4.000 s outside nodes"
    )


def test_a_nested_repeat_counts_once():
    inner = [
        Span("generate", "model", 1.0, 3.0),
        Span("narrow", "control", 0.5, 3.5),
        Span("keep", "cpu", 3.5, 4.0, ("narrow",)),
        Span("wide", "control", 0.0, 5.0),
    ]
    totals = RunTotals({"model": 1}, within={"generate": "narrow", "narrow": "wide", "keep": "wide"})
    totals.add(inner, 0.0, 5.0)
    assert {share.node: share.seconds for share in totals} == {
        "generate": 2.0,
        "narrow": 1.0,
        "keep": 0.5,
        "wide": 1.5,
    }
    assert [*totals.bounds.critical] == ["generate", "narrow", "keep", "wide"]
    assert totals.bounds.path == 5.0


def test_concurrent_nodes_share_their_time():
    totals = RunTotals({"model": 1, "io": 8})
    totals.add(
        [
            Span("generate", "model", -4.0, 2.0),
            Span("reward", "io", 1.0, 5.0),
            Span("logprobs", "model", 2.0, 3.0),
        ],
        0.0,
        5.0,
    )
    assert {share.node: share.part for share in totals} == {"generate": 1.5, "reward": 3.0, "logprobs": 0.5}


def test_the_critical_path_is_the_most_frequent_one():
    """In two iterations the reward ends last, in one the values, which were once late. A path from mean times
    would combine both."""
    rewarded = [
        Span("generate", "model", 0, 4),
        Span("reward", "io", 4, 9, ("generate",)),
        Span("gae", "cpu", 9, 10, ("reward", "values")),
    ]
    valued = [
        Span("generate", "model", 0, 1),
        Span("values", "model", 1, 2, ("generate",)),
        Span("gae", "cpu", 2, 20, ("reward", "values")),
        Span("remember", "cpu", 20, 21, ("gae",)),
    ]
    totals = RunTotals({"model": 1, "cpu": 2, "io": 8})
    for spans in (rewarded, valued, rewarded):
        totals.add(spans, 0.0, spans[-1].end + 0.5)
    assert totals.bounds.critical == {"generate": 4.0, "reward": 5.0, "gae": 1.0}
    assert (totals.bounds.alike, totals.bounds.outside) == (2, 0.5)
    said = (
        "critical path (of 2 iterations): generate 4.000 s → reward 5.000 s → gae 1.000 s; 0.500 s "
        "outside nodes"
    )
    assert bounds_text(totals).splitlines()[-2] == said


def test_a_queue_delays_a_node_only_if_it_is_full():
    """b ended last before d began, in d's queue. The queue had a free slot then, so d waited for a."""
    spans = [Span("a", "model", 0, 4), Span("b", "cpu", 0, 4.5), Span("d", "cpu", 5, 6, ("a",))]
    assert [span.node for span in critical_path(spans, {"cpu": 2})] == ["a", "d"]
    assert [span.node for span in critical_path([*spans, Span("c", "cpu", 1, 8)], {"cpu": 2})] == ["c"]
    full = [*spans, Span("c", "cpu", 1, 5.5)]
    assert [span.node for span in critical_path(full, {"cpu": 2})] == ["b", "d"]
    assert [span.node for span in critical_path(full, {})] == ["a", "d"]  # a queue without a limit


def test_no_iteration_gives_no_report():
    assert bounds_text(RunTotals()) == "no iteration was completed"
    assert RunTotals({"model": 1}).as_json()["bound"] == 0.0


def test_an_empty_iteration_has_no_path():
    assert critical_path([]) == []


def test_the_path_of_a_flow_with_a_repeat_follows_its_plan(tmp_path):
    result = rlflow.run(
        "dapo",
        backend="null",
        prompts=4,
        iterations=3,
        out=str(tmp_path),
        **{"hp.samples": 2, "hp.groups": 4, "hp.tries": 3, "hp.max_tokens": 4, "hp.overlong": 0},
    )
    made = plan(
        compile_flow(load_flow("dapo"), dataclasses.replace(load_flow("dapo").parameters.hp, overlong=0))
    )
    body = made.bodies[made.graph.by_name["repeat.sampled"].id]
    allowed = {(a.name, "repeat.sampled") for a in body.graph.nodes}
    for graph, each in ((made.graph, made), (body.graph, body)):
        allowed |= {
            (graph.nodes[i].name, graph.nodes[j].name) for j, before in each.waits_for.items() for i in before
        }
        models = [graph.nodes[i].name for i in each.live if each.lane[i] == "model"]
        allowed |= set(permutations(models, 2))
    chain = [*result.totals.bounds.critical]
    assert set(pairwise(chain)) <= allowed
    assert chain[-1] == "actor.update"
    assert "repeat.sampled" in chain
    assert sum(share.critical for share in result.totals) <= result.totals.seconds
    assert sum(share.part for share in result.totals) <= result.totals.seconds
