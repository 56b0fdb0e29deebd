"""Show a run as HTML in notebooks, with its numbers and learning curve.

The HTML uses no scripts and no network, and all text in it is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

from rlflow.errors import printable
from rlflow.monitoring.metric_names import is_mean
from rlflow.monitoring.recorded import Curve, recorded

WIDTH, HEIGHT, MARGIN = 420.0, 150.0, 34.0  # pixels


def run_html(folder: Path, rows: Iterable[tuple[str, str]]) -> str:
    """Return a run as HTML: a table of the (name, value) pairs in ``rows``, then its held-out accuracy.

    If there is no held-out accuracy, the mean of each reward is drawn instead.
    """
    run = recorded(folder)
    metrics = [name for name in run.shares if run.curve(name)][:1] or run.keys(is_mean)
    cells = "".join(
        f'<tr><td style="text-align:left">{_safe(name)}</td><td '
        f'style="text-align:left">{_safe(value)}</td></tr>'
        for name, value in rows
    )
    pictures = "".join(
        f"<div>{_safe(metric)} after iterations</div>{curve_svg(run.curve(metric))}" for metric in metrics
    )
    return f'<div style="font:13px sans-serif"><table>{cells}</table>{pictures}</div>'


def curve_svg(curve: Curve) -> str:
    """Return a curve as SVG, with a line through its points and labels at the ends of both axes."""
    xs, ys = [float(x) for x, _ in curve], [y for _, y in curve]
    points = [
        (
            MARGIN + (WIDTH - 2 * MARGIN) * _share(x, xs),
            HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * _share(y, ys),
        )
        for x, y in zip(xs, ys, strict=True)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="#2a6fb0"><title>{value:.4g} after '
        f"{number}</title></circle>"
        for (x, y), (number, value) in zip(points, curve, strict=True)
    )
    low, right = HEIGHT - MARGIN, WIDTH - MARGIN
    ends = [
        (MARGIN - 4, low, "end", f"{min(ys):.3g}"),
        (MARGIN - 4, MARGIN, "end", f"{max(ys):.3g}"),
        (MARGIN, HEIGHT - 14, "start", f"{min(xs):g}"),
        (right, HEIGHT - 14, "end", f"{max(xs):g}"),
    ]
    texts = "".join(
        f'<text x="{x:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{text}</text>'
        for x, y, anchor, text in ends
    )
    axes = f'<path d="M{MARGIN},{MARGIN} V{low} H{right}" fill="none" stroke="#999"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH:.0f}" height="{HEIGHT:.0f}" '
        f'font-family="sans-serif" font-size="11">{axes}<polyline points="{line}" fill="none" '
        f'stroke="#2a6fb0" stroke-width="1.5"/>{dots}{texts}</svg>'
    )


def _share(value: float, values: list[float]) -> float:
    """Return where ``value`` lies in the range of ``values``, from 0 to 1, or 0.5 if they are all equal."""
    low, high = min(values), max(values)
    return (value - low) / (high - low) if high > low else 0.5


def _safe(text: str) -> str:
    return escape(printable(text))
