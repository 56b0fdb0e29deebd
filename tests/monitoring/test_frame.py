"""The live view's drawing: a curve needs two points."""

import io

from rich.console import Console

from rlflow.monitoring.frame import Frame, draw


def drawn(*curve):
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(draw(Frame(flow="grpo", place="runs/grpo-1", iterations=3, curve=list(curve)), 80))
    return console.export_text()


def test_a_curve_is_drawn_from_the_second_evaluation_on():
    assert "held-out accuracy" not in drawn((0, 0.5))
    assert "held-out accuracy" in drawn((0, 0.5), (3, 0.75))
