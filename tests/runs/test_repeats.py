"""A repeat that kept fewer groups than it was to is told of."""

from keyed import figures

from rlflow.algorithms import dapo
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import compile_flow
from rlflow.runs.guards import short_repeat_warnings


def told(kept):
    made = plan(compile_flow(dapo.dapo, dapo.DAPO(groups=8)))
    return list(short_repeat_warnings(made, figures(kept)))


def test_a_repeat_that_fell_short_is_told_of():
    assert told({"repeat.sampled/kept": 5.0, "repeat.sampled/tries": 10.0}) == [
        "repeat.sampled: only 5 of 8 groups were kept in 10 tries; the iteration trains on these"
    ]


def test_one_that_did_not_or_did_not_run_is_not():
    assert told({"repeat.sampled/kept": 8.0, "repeat.sampled/tries": 3.0}) == told({}) == []
