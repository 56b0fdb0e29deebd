"""The rows of a timeline."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rlflow.compiler.spans import RankSpan, Span
from rlflow.runs.records import RANKS, Timeline


def rows(events):
    """Return the names of the rows by process, in their order on screen, and the slices by row."""
    named, processes, slices = {}, {}, {}
    for event in events:
        if event["name"] == "process_name":
            processes[event["pid"]] = event["args"]["name"]
        elif event["name"] == "thread_name":
            named[event["pid"], event["tid"]] = event["args"]["name"]
        elif event["ph"] == "X":
            slices.setdefault((processes[event["pid"]], named[event["pid"], event["tid"]]), []).append(event)
    return {
        name: [row for (pid, _), row in sorted(named.items()) if processes[pid] == name]
        for name in processes.values()
    }, slices


def test_a_pool_has_a_row_for_its_models_stages_rewards_and_each_rank():
    timeline = Timeline(["train", "rollout"])
    spans = [
        Span("reward", "rollout.io", 14, 16),
        Span("update", "train", 16, 20, ("reward",)),
        Span("best", "train.cpu", 13, 14),
        Span("generate", "rollout", 10, 13),
        Span("tries", "control", 10, 12),
    ]
    ranks = [RankSpan("update", "train", rank, 17, 19, 0, "update") for rank in (1, 0, RANKS)]
    named, slices = rows(timeline.events(0, spans, ranks))
    assert named == {
        "rlflow": ["control"],
        "pool train": ["models", "stages", "rank 0", "rank 1"],
        "pool rollout": ["models", "rewards"],
    }
    [update] = slices["pool train", "models"]
    assert (update["name"], update["ts"], update["dur"]) == ("update", 6e6, 4e6)
    assert update["args"] == {"iteration": 0, "waits for": ["reward"]}
    assert slices["pool train", "rank 1"][0]["args"] == {"iteration": 0, "op": "update"}
    later = list(timeline.events(1, [Span("update", "train", 20, 21)], ()))
    # a row is named once
    assert [(event["ph"], event["tid"], event["ts"]) for event in later] == [("X", update["tid"], 10e6)]


def test_in_one_process_each_queue_has_a_row():
    named, _ = rows(
        Timeline().events(
            0, [Span("a", "model", 0, 1), Span("b", "io", 0, 3), Span("c", "io", 1, 2), Span("d", "io", 3, 4)]
        )
    )
    assert named == {"rlflow": ["model", "io", "io (2)"]}


spans = st.builds(
    lambda lane, start, seconds: Span("x", lane, start, start + seconds),
    st.sampled_from(["a", "a.io", "b", "io"]),
    st.integers(0, 20),
    st.integers(1, 6),
)
parts = st.builds(
    lambda pool, rank, start, seconds: RankSpan("x", pool, rank, start, start + seconds),
    st.sampled_from("ab"),
    st.integers(0, 2),
    st.integers(0, 20),
    st.integers(1, 6),
)


@given(st.lists(st.tuples(st.lists(spans, max_size=8), st.lists(parts, max_size=8)), max_size=3))
def test_slices_of_a_row_never_overlap_or_disappear(iterations):
    timeline, events = Timeline("ab"), []
    for number, (ran, ranks) in enumerate(iterations):
        events += timeline.events(number, ran, ranks)
    _, slices = rows(events)
    assert sum(map(len, slices.values())) == sum(len(ran) + len(ranks) for ran, ranks in iterations)
    for row in slices.values():
        row.sort(key=lambda event: event["ts"])
        assert all(one["ts"] + one["dur"] <= other["ts"] + 1 for one, other in pairwise(row))
