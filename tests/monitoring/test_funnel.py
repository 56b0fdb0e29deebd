"""The funnel in words."""

from keyed import figures
from rich.console import Console

from rlflow.monitoring.frame import Frame, draw
from rlflow.monitoring.funnel import funnel_lines

ROWS = {
    "funnel/rows_sampled": 512.0,
    "funnel/rows_scored": 500.0,
    "funnel/rows_mixed": 160.0,
    "funnel/rows_untruncated": 150.0,
    "funnel/rows_used": 500.0,
}
TOKENS = {
    "actor.update/funnel/tokens": 2040.0,
    "actor.update/funnel/tokens_with_gradient": 640.0,
    "actor.update/funnel/tokens_effective": 410.2,
}
CLIPPED = {"actor.update/funnel/tokens_clipped_above": 3.0, "actor.update/funnel/tokens_clipped_below": 17.0}


def test_rows_and_tokens_have_a_line_each():
    assert funnel_lines(figures(ROWS | TOKENS | CLIPPED)) == [
        "rows: 512 sampled → 500 scored → 500 used; 160 in groups with unequal scores, of these 150 not truncated",
        "tokens of actor.update: 2,040 → 640 with a gradient → 410 effective; clipped 3 above, 17 below",
    ]


def test_missing_figures_of_an_algorithm_are_not_named():
    assert funnel_lines(figures({"funnel/rows_used": 64.0} | TOKENS)) == [
        "rows: 64 used",
        "tokens of actor.update: 2,040 → 640 with a gradient → 410 effective",
    ]
    assert funnel_lines(figures({"reward/mean": 0.5})) == []


def test_roles_are_named_if_there_are_several():
    assert funnel_lines(figures({f"solver/{name}": value for name, value in ROWS.items()}))[0].startswith(
        "rows of solver: 512 sampled"
    )


def test_a_frame_shows_the_funnel():
    console = Console(width=120)
    with console.capture() as text:
        console.print(draw(Frame(metrics=figures(ROWS | TOKENS)), 120))
    assert "160 in groups with unequal scores" in text.get()
    assert "640 with a gradient" in text.get()
