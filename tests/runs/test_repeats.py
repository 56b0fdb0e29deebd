"""The warning for a repeat that kept fewer groups than requested."""

from keyed import figures

from rlflow.algorithms import dapo
from rlflow.compiler.passes import plan
from rlflow.compiler.trace.compile import compile_flow
from rlflow.runs.guards import short_repeat_warnings


def warnings_for(kept):
    made = plan(compile_flow(dapo.dapo, dapo.DAPO(groups=8)))
    return list(short_repeat_warnings(made, figures(kept)))


def test_a_repeat_with_too_few_groups_is_reported():
    assert warnings_for({"repeat.sampled/kept": 5.0, "repeat.sampled/tries": 10.0}) == [
        "repeat.sampled: only 5 of 8 groups were kept in 10 tries; the iteration trains on these"
    ]


def test_a_complete_or_unused_repeat_is_not_reported():
    assert warnings_for({"repeat.sampled/kept": 8.0, "repeat.sampled/tries": 3.0}) == warnings_for({}) == []
