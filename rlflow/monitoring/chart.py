"""Draw curves as text charts, for terminals with and without colors."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from rlflow.monitoring.recorded import Curve

COLORS = ("cyan", "magenta", "yellow", "green", "blue", "red")
# one letter per curve, so that several curves can be told apart without colors
MARKS = string.ascii_uppercase + string.ascii_lowercase
ALONE = "•"  # marks the points of a single curve
BETWEEN = "·"  # on the line from one point to the next
SEVERAL = "*"  # marks a cell with points of several curves
HEIGHT = 8  # lines of a chart, without its axis
Cells = dict[tuple[int, int], tuple[str, str]]  # (line from the bottom, column) → (character, style)


def mark(position: int) -> str:
    """Return the letter for a curve in a chart, or "?" if there are more curves than letters."""
    return MARKS[position] if position < len(MARKS) else "?"


def color(position: int) -> str:
    """Return the color of a curve in a chart, by its position."""
    return COLORS[position % len(COLORS)]


def chart(curves: Mapping[str, Curve], width: int, height: int = HEIGHT) -> Text:
    """Return a text chart of the curves.

    It is at most ``width`` columns wide, with ``height`` lines above the axis. Points are drawn as the key of
    their curve in ``curves``. If a curve has several points in one column, their mean is drawn. Curves
    without points are skipped.
    """
    drawn = {name: curve for name, curve in curves.items() if curve}
    values = [value for curve in drawn.values() for _, value in curve]
    if not values:
        return Text("")
    low, high = min(values), max(values)
    left, right = min(curve[0][0] for curve in drawn.values()), max(curve[-1][0] for curve in drawn.values())
    labels = _labels(low, high, height)
    margin = max(map(len, labels))
    columns = max(width - margin - 2, 8)
    cells: Cells = {}
    for position, (name, curve) in enumerate(curves.items()):
        style = color(position) if len(curves) > 1 else ""
        _add(cells, list(_cells(curve, (left, right), (low, high), (columns, height))), name, style)
    text = Text(no_wrap=True)
    for line in reversed(range(height)):
        text.append(f"{labels[line]:>{margin}} ┤" if labels[line] else f"{'':>{margin}} │")
        for column in range(columns):
            text.append(*cells.get((line, column), (" ", "")))
        text.rstrip()
        text.append("\n")
    ends = f"{left}{right:>{columns - len(str(left))}}" if right > left else str(left)
    return text.append(f"{'':>{margin}} └{'─' * columns}\n{'':>{margin}}  {ends}")


def _labels(low: float, high: float, height: int) -> list[str]:
    """Return the label on the y-axis for each line, from the bottom up. Most are empty."""
    if high <= low:
        return [f"{low:.4g}", *[""] * (height - 1)]
    labelled = {0, (height - 1) // 2, height - 1}
    return [
        f"{low + (high - low) * line / max(height - 1, 1):.4g}" if line in labelled else ""
        for line in range(height)
    ]


def _cells(
    curve: Curve, across: tuple[int, int], up: tuple[float, float], size: tuple[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield (column, line from the bottom) for each column in which the curve has points.

    Several points in a column are averaged. ``across`` and ``up`` are the ranges of the axes, ``size`` the
    number of columns and lines.
    """
    by_column: dict[int, list[float]] = {}
    for number, value in curve:
        by_column.setdefault(_place(number, *across, size[0]), []).append(value)
    for column, values in by_column.items():
        yield column, _place(sum(values) / len(values), *up, size[1])


def _place(value: float, low: float, high: float, count: int) -> int:
    """Return which of ``count`` evenly spaced levels from ``low`` to ``high`` is nearest to ``value``."""
    return round((value - low) / (high - low) * (count - 1)) if high > low else 0


def _add(cells: Cells, points: Sequence[tuple[int, int]], name: str, style: str) -> None:
    """Draw a curve's points, and lines between them where cells are still empty."""
    for (start, below), (end, above) in itertools.pairwise(points):
        for column in range(start + 1, end):
            line = round(below + (above - below) * (column - start) / (end - start))
            cells.setdefault((line, column), (BETWEEN, style))
    for column, line in points:
        other = cells.get((line, column), (BETWEEN, ""))[0]
        cells[line, column] = (name, style) if other in (BETWEEN, name) else (SEVERAL, "")
