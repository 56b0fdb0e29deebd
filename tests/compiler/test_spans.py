"""The critical path against its definition, a search of all spans at each step."""

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from rlflow.compiler.spans import Span, busy, critical_path, longest_path


def defined(spans):
    path = []
    current = max(spans, key=lambda span: span.end, default=None)
    while current is not None:
        path.append(current)
        node = current
        before = [
            s
            for s in spans
            if s.end <= node.start + 1e-9
            and (s.node in node.waits_for or s.lane == node.lane)
            and s not in path
        ]
        current = max(before, key=lambda span: span.end, default=None)
    return path[::-1]


@st.composite
def spans(draw, least=1):
    start = draw(st.integers(0, 12))
    names = st.sampled_from("vwxyz")
    seconds = draw(st.integers(least, 4))
    return Span(
        draw(names),
        draw(st.sampled_from("ab")),
        start,
        start + seconds,
        tuple(draw(st.lists(names, max_size=3))),
    )


@given(st.lists(spans(), max_size=16))
def test_the_path_matches_its_definition(spans):
    assert critical_path(spans) == defined(spans)


def waited(spans, later):
    return [s for s in spans if s.end <= later.start and (s.node in later.waits_for or s.lane == later.lane)]


def back_to(spans, later):
    """Return all spans that ended just as a span began, also through spans of zero length."""
    found = [later]
    for one in found:
        found += [
            s for s in waited(spans, one) if s.end == later.start and s not in found and s.start == s.end
        ]
    return [s for one in found for s in waited(spans, one) if s.end == later.start and s not in found]


@given(st.lists(spans(least=0), max_size=16, unique=True))
def test_zero_length_spans_hide_no_earlier_span(spans):
    path = critical_path(spans)
    assert all(first in waited(spans, later) for first, later in pairwise(path))
    assert [
        later for first, later in pairwise(path) if first.end < later.start and back_to(spans, later)
    ] == []
    assert not path or path[0].start == 0 or not waited([s for s in spans if s not in path], path[0])


def test_time_before_consecutive_zero_length_spans_counts():
    spans = [
        Span("late", "a", 0, 1),
        Span("x", "b", 1, 1, ("late",)),
        Span("y", "b", 1, 1),
        Span("end", "b", 1, 2),
    ]
    assert {path[0].node for order in permutations(spans) if (path := critical_path(order))} == {"late"}


@given(st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 7), max_size=3)), max_size=8))
def test_the_longest_path_is_the_longest_of_all_chains(nodes):
    """Run nodes of some seconds on unlimited workers; each starts when the last of its earlier nodes ends."""
    spans, chains = [], [0.0]
    for number, (seconds, before) in enumerate(nodes):
        waits = [spans[i] for i in before if i < number]
        start = max((span.end for span in waits), default=0.0)
        spans.append(Span(str(number), "a", start, start + seconds, tuple(span.node for span in waits)))
        chains.append(start + seconds)
    assert longest_path(spans) == max(chains)
    # consecutive
    late = [
        Span(s.node, s.lane, s.start + i * 100, s.end + i * 100, s.waits_for) for i, s in enumerate(spans)
    ]
    assert longest_path(late) == max(chains)


def test_a_repeated_node_follows_its_first_run():
    tries = [
        Span("x", "a", 0, 2),
        Span("y", "b", 2, 3, ("x",)),
        Span("x", "a", 3, 5),
        Span("y", "b", 5, 6, ("x",)),
    ]
    assert longest_path(tries) == 5  # x, x, y: the engine decides what keeps the second x waiting for y
    assert longest_path([]) == 0.0


def test_a_queue_is_busy_for_its_share_of_slots():
    spans = [Span("x", "a", 0, 4), Span("y", "a", 1, 3), Span("z", "b", 0, 5)]
    assert busy(spans, 10, {"a": 2}) == {"a": 0.3, "b": 0.5}
    assert busy([], 0.0, {}) == {}
