"""Draw the pictures of the README: ``python benchmarks/pictures.py`` writes docs/images/rloo.svg and learning.svg.

The graph is that of algorithms/rloo.py. The curves are the table "Accuracy by iteration" of docs/learning.md,
which `rlflow bench learning --markdown FILE` measures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlflow.author.load import load_flow
from rlflow.compiler.graph.draw import svg
from rlflow.compiler.trace.compile import compile_flow

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
# pixels
WIDTH, HEIGHT, LEFT, BOTTOM, EDGE = 620.0, 260.0, 46.0, 36.0, 14.0
LABELS = 70.0  # room for the names of the curves
COLORS = ("#2a6fb0", "#c4572e", "#3f8f4f")
LOW, HIGH, STEP = 40, 100, 20  # percent on the vertical axis

Curve = Sequence[tuple[int, float]]  # (iteration, percent)


def graph_picture() -> str:
    """Return the graph of rloo as SVG, without the places in files that tooltips would show."""
    graph = compile_flow(load_flow(str(ROOT / "algorithms" / "rloo.py"))).graph
    return re.sub(r"<title>.*?</title>", "", svg(graph), flags=re.DOTALL) + "\n"


def curves_of(page: str) -> dict[str, Curve]:
    """Return the learning curves in the table "Accuracy by iteration" of a page, by algorithm."""
    _, _, section = page.partition("## Accuracy by iteration\n")
    head, _, *rows = re.findall(r"^\|(.*)\|$", section.partition("\n## ")[0], re.MULTILINE)
    iterations = [int(cell) for cell in head.split("|")[1:]]
    curves = {}
    for row in rows:
        name, *cells = (cell.strip() for cell in row.split("|"))
        curves[name] = list(zip(iterations, (float(cell.rstrip("%")) for cell in cells), strict=True))
    return curves


def learning_picture(curves: Mapping[str, Curve]) -> str:
    """Return the curves as SVG, with axes, grid lines, and the name of each curve at its right end."""
    last = max(number for curve in curves.values() for number, _ in curve)

    def x(number: float) -> float:
        return LEFT + (WIDTH - LEFT - LABELS) * number / last

    def y(percent: float) -> float:
        return EDGE + (HEIGHT - EDGE - BOTTOM) * (HIGH - percent) / (HIGH - LOW)

    parts = [
        f'<path d="M{x(0):.1f},{y(percent):.1f} H{x(last):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 6:.1f}" y="{y(percent) + 4:.1f}" text-anchor="end">{percent}%</text>'
        for percent in range(LOW, HIGH + 1, STEP)
    ]
    parts += [
        f'<text x="{x(number):.1f}" y="{HEIGHT - 18:.1f}" text-anchor="middle">{number}</text>'
        for number in range(0, last + 1, 10)
    ]
    parts.append(
        f'<text x="{x(last / 2):.1f}" y="{HEIGHT - 3:.1f}" text-anchor="middle" fill="#666">iteration</text>'
    )
    ends = _apart([y(curve[-1][1]) for curve in curves.values()])
    for (name, curve), color, end in zip(curves.items(), COLORS, ends, strict=True):
        points = " ".join(f"{x(number):.1f},{y(percent):.1f}" for number, percent in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<text x="{x(last) + 6:.1f}" y="{end + 4:.1f}" fill="{color}">{name}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" '
        f'width="{WIDTH:.0f}" height="{HEIGHT:.0f}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def _apart(heights: Sequence[float], room: float = 14.0) -> list[float]:
    """Move heights that are less than ``room`` apart, and return all heights in the given order."""
    moved = dict.fromkeys(range(len(heights)), 0.0)
    free = float("-inf")
    for number in sorted(moved, key=lambda number: heights[number]):
        free = moved[number] = max(heights[number], free + room)
    return list(moved.values())


def pictures() -> dict[Path, str]:
    """Return the content of each picture, by file path."""
    page = (ROOT / "docs" / "learning.md").read_text()
    return {IMAGES / "rloo.svg": graph_picture(), IMAGES / "learning.svg": learning_picture(curves_of(page))}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for file, content in pictures().items():
        file.write_text(content)
        print(file.relative_to(ROOT))
