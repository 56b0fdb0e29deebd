"""The critical path against its definition, a search of all spans at each step."""

from hypothesis import given
from hypothesis import strategies as st

from rlflow.spans import Span, busy, critical_path


def defined(spans):
    path = []
    current = max(spans, key=lambda span: span.end, default=None)
    while current is not None:
        path.append(current)
        node = current
        before = [s for s in spans if s.end <= node.start + 1e-9 and (s.node in node.waits_for or s.lane == node.lane) and s not in path]
        current = max(before, key=lambda span: span.end, default=None)
    return path[::-1]


@st.composite
def spans(draw):
    start = draw(st.integers(0, 12))
    names = st.sampled_from("vwxyz")
    return Span(draw(names), draw(st.sampled_from("ab")), start, start + draw(st.integers(0, 4)), tuple(draw(st.lists(names, max_size=3))))


@given(st.lists(spans(), max_size=16))
def test_the_path_is_the_defined_one(spans):
    assert critical_path(spans) == defined(spans)


def test_a_lane_is_busy_for_its_share_of_its_room():
    spans = [Span("x", "a", 0, 4), Span("y", "a", 1, 3), Span("z", "b", 0, 5)]
    assert busy(spans, 10, {"a": 2}) == {"a": 0.3, "b": 0.5}
    assert busy([], 0.0, {}) == {}
