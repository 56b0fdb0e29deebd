"""Draw the frames of the live view and `rlflow watch`. A frame is the state of a run at one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlflow.author.figures import SECONDS, SPEED, Figure, Of
from rlflow.errors import printable
from rlflow.monitoring.chart import ALONE, chart
from rlflow.monitoring.funnel import funnel_lines
from rlflow.monitoring.keys import Figures
from rlflow.monitoring.metric_names import accuracies, means, own_metrics
from rlflow.monitoring.recorded import Curve

STAGES = 8  # how many nodes get a bar, slowest first
RECENT = 20  # how many of the last iterations the remaining time is estimated from
CHART, LINES = 72, 4  # maximum columns of the learning curve, and its lines
OWN = 6  # how many metrics of the author's own stages are shown
POLICY = ("actor", "policy")  # roles whose updates are shown
SHOWN = {
    (Of.ROWS, "policy/kl_reference"): ("KL", "{:.4f}"),
    (Of.UPDATE, "kl"): ("KL (old)", "{:.4f}"),
    (Of.ROWS, "policy/kl_sampler"): ("KL (sampler)", "{:.4f}"),
    (Of.ROWS, "policy/entropy"): ("entropy", "{:.3f}"),
    (Of.ROWS, "response/length"): ("length", "{:.1f}"),
    (Of.ROWS, "response/truncated"): ("truncated", "{:.1%}"),
    (Of.RUN, SPEED.name): ("tokens/s", "{:,.0f}"),
    (Of.UPDATE, "clipped"): ("clipped", "{:.1%}"),
    (Of.UPDATE, "grad_norm"): ("gradient", "{:.3g}"),
}


@dataclass(frozen=True)
class Frame:
    """The state of a run at one moment."""

    flow: str = ""
    place: str = ""  # the run's folder
    state: str = "running"
    done: int = 0  # number of finished iterations
    iterations: int = 0  # number of planned iterations
    metrics: Figures = field(default_factory=dict)  # metrics of the last iteration
    evaluation: Figures = field(default_factory=dict)  # metrics of the last evaluation
    evaluated: int = 0  # number of iterations before the last evaluation
    stages: Mapping[str, float] = field(default_factory=dict)  # node → seconds in the last iteration
    recent: tuple[float, ...] = ()  # seconds of the last iterations
    curve: Curve = ()  # held-out accuracy by number of finished iterations
    trained: int = 0  # number of rows that updates used, in the iterations that this view has seen
    running: float = 0.0  # seconds since the end of the last iteration


def draw(frame: Frame, width: int) -> RenderableType:
    """Return the drawing of a frame for a terminal with ``width`` columns."""
    funnel = [
        Text(line, style="dim", no_wrap=True, overflow="ellipsis")
        for line in map(printable, funnel_lines(frame.metrics))
    ]
    parts = [_head(frame, width), _numbers(frame), *funnel, _stages(frame, width)]
    if len(frame.curve) > 1:
        parts += [
            Text("held-out accuracy", style="dim"),
            chart({ALONE: frame.curve}, min(width, CHART), LINES),
        ]
    return Group(*parts)


def _head(frame: Frame, width: int) -> RenderableType:
    flow, place = printable(frame.flow), printable(frame.place)
    space = max(width - len(flow) - 2, 2)
    if len(place) > space:  # keep the end of the path, which is the run's name
        place = "…" + place[1 - space :]
    title = Text(f"{flow}  {place}", style="bold", no_wrap=True, overflow="ellipsis")
    grid = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(frame.iterations, 1), completed=frame.done, width=max(min(40, width // 3), 4))
    number = Text(f"{frame.done}/{frame.iterations} iterations", no_wrap=True)
    grid.add_row(number, bar, Text(_time(frame), no_wrap=True, overflow="ellipsis"))
    return Group(title, grid)


def _time(frame: Frame) -> str:
    if frame.state != "running":
        return frame.state
    if not frame.recent:
        return f"{format_duration(frame.running)} in the first iteration"
    mean = sum(frame.recent) / len(frame.recent)
    remaining = max((frame.iterations - frame.done) * mean - min(frame.running, mean), 0.0)
    return (
        f"{format_duration(mean)} each, {format_duration(remaining)} left"
        if frame.done < frame.iterations
        else "ending"
    )


def _numbers(frame: Frame) -> RenderableType:
    """Lay out the frame's numbers, as many per line as fit."""
    texts = [
        Text.assemble((f"{printable(name)} ", "dim"), (value, "bold"), no_wrap=True)
        for name, value in figures(frame)
    ]
    return Columns(texts, padding=(0, 3))


def figures(frame: Frame) -> list[tuple[str, str]]:
    """Return (name, text) for each number the frame shows."""
    metrics = {
        figure: value for figure, value in frame.metrics.items() if value is not None and math.isfinite(value)
    }
    numbers = [
        (figure.node, f"{frame.metrics[figure]:.3f}")
        for figure in means(frame.metrics)[:3]
        if frame.metrics[figure] is not None
    ]
    for name, share in accuracies(frame.evaluation).items():
        role, _, which = f" of {name}".rpartition(" ")
        if which == "sampled":
            numbers.append(
                (f"accuracy{role if ' ' in name else ''}", f"{share:.1%} (after {frame.evaluated})")
            )
    for (of, name), (label, form) in SHOWN.items():
        own = [
            figure
            for figure in metrics
            if figure.of is of and figure.name == name and (of is not Of.UPDATE or figure.role in POLICY)
        ]
        numbers += [(_labelled(label, figure), form.format(metrics[figure])) for figure in own]
    numbers += [("rows trained", f"{frame.trained:,}")] if frame.trained else []
    return numbers + [(figure.key, f"{metrics[figure]:.4g}") for figure in own_metrics(metrics)[:OWN]]


def _labelled(label: str, figure: Figure) -> str:
    """Return a number's label, with the role added if it is a number of one role's rows."""
    return f"{label} of {figure.role}" if figure.role and figure.of is Of.ROWS else label


def _stages(frame: Frame, width: int) -> RenderableType:
    """Return a bar for each of the slowest nodes, with its share of the iteration's time.

    Nodes overlap, so the shares can add up to more than 100%.
    """
    total = frame.metrics.get(SECONDS) or sum(frame.stages.values()) or 1.0
    grid = Table.grid(padding=(0, 1))
    slowest = sorted(frame.stages.items(), key=lambda item: -item[1])
    for name, seconds in slowest[:STAGES]:
        bar = ProgressBar(total=total, completed=min(seconds, total), width=max(min(30, width // 4), 4))
        share = Text(f"{seconds / total:4.0%} {format_duration(seconds)}", no_wrap=True)
        grid.add_row(Text(f"  {printable(name)}", no_wrap=True, overflow="ellipsis"), bar, share)
    if len(slowest) > STAGES:
        grid.add_row(Text(f"  and {len(slowest) - STAGES} more", style="dim"))
    return grid


def format_duration(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"
