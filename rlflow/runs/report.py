"""The summary that a run prints at its end."""

from __future__ import annotations

import io
import math

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table

from rlflow.compiler.passes.queues import queue_words
from rlflow.errors import printable
from rlflow.monitoring.explained import pointer
from rlflow.monitoring.metric_names import accuracies, change, share
from rlflow.monitoring.recorded import recorded
from rlflow.monitoring.tables import curves
from rlflow.runs.bounds import PATH, RunTotals, TimeBounds
from rlflow.runs.context import RunResult
from rlflow.runs.evaluate import shown
from rlflow.runs.outcomes import outcomes_text, run_account

SHOWN = 0.01  # share of an iteration; smaller parts are not mentioned
WIDTHS = {"prompt": 40, "answer": 14, "before": 14, "after": 14}


def summary(result: RunResult) -> str:
    """Return the summary of a run as text.

    It has the accuracy before and after, and for each node its time, its share of the time, and its part of
    the critical path.
    """
    parts = []
    if result.before and result.after:
        parts += [_rendered(_learning(result)), _rendered(_answers(result))]
    if result.unmeasured:
        parts.append(result.unmeasured)
    parts += [_rendered(part) for part in curves(recorded(result.folder))]
    parts.append(bounds_text(result.totals))
    if fates := outcomes_text(run_account(result.folder)):
        parts.append(fates)
    if result.skipped:
        parts.append(
            f"{result.skipped} of {result.iterations} iterations were skipped: no rows were kept to train on"
        )
    if line := pointer(result.folder, result.shown):
        parts.append(line)
    many = "s" * (result.iterations != 1)
    parts.append(
        f"{result.iterations} iteration{many} in {result.seconds:.1f} s; run folder: {result.shown or result.folder}"
    )
    if result.unsaved:
        parts.append(f"warning: {result.unsaved}")
    return "\n".join(parts)


def _learning(result: RunResult) -> Table:
    assert result.before is not None
    assert result.after is not None
    table = Table("held-out accuracy", "before", "after", "change")
    first, last = accuracies(shown(result.before)), accuracies(shown(result.after))
    for name, after in last.items():
        before = first.get(name, math.nan)
        table.add_row(name, share(before), share(after), change(before, after))
    one, two = result.before.score, result.after.score
    if one is not None and two is not None:
        table.add_row("mean score", f"{one:.3f}", f"{two:.3f}", f"{two - one:+.3f}")
    return table


def _answers(result: RunResult) -> Table:
    table = Table("held-out prompt", "answer", "before", "after")
    for row in result.answers[:5]:
        table.add_row(*(escape(printable(_cut(row.get(name, ""), width))) for name, width in WIDTHS.items()))
    return table


def _cut(text: str, width: int) -> str:
    """The end of a text, on one line.

    The end is shown because questions often start with the same words.
    """
    line = " ".join(text.split())
    return line if len(line) <= width else "…" + line[1 - width :]


def bounds_text(totals: RunTotals) -> str:
    """Return a table of the nodes of a run, and lines that say what limited its speed."""
    bounds = totals.bounds
    if not bounds.iterations:
        return "no iteration was completed"
    by = bounds.by if bounds.by == PATH else f"the total work of {queue_words(bounds.by)}"
    alike = (
        f" (of {bounds.alike} iteration{'s' if bounds.alike > 1 else ''})"
        if bounds.alike < bounds.iterations
        else ""
    )
    shares = ", ".join(
        f"{queue_words(lane)} {share:.0%}"
        for lane, share in bounds.busy.items()
        if share >= SHOWN or "." not in lane
    )
    return "\n".join(
        [
            _rendered(_stages(totals)),
            (
                f"an iteration took {bounds.seconds:.3f} s; any schedule of its nodes takes at least "
                f"{bounds.bound:.3f} s: {by}"
            ),
            f"critical path{alike}: {_chain(bounds)}; {bounds.outside:.3f} s outside nodes",
            f"busy: {shares}",
        ]
    )


def _chain(bounds: TimeBounds) -> str:
    """The nodes of the critical path as text. Nodes that took almost no time are replaced with "…"."""
    words = [
        f"{node} {seconds:.3f} s" if seconds >= SHOWN * bounds.seconds else "…"
        for node, seconds in bounds.critical.items()
    ]
    return " → ".join(
        word for word, before in zip(words, ["", *words], strict=False) if (word, before) != ("…", "…")
    )


def _stages(totals: RunTotals) -> Table:
    table = Table("node", "calls", "seconds", "share", "on the critical path")
    for column in table.columns[1:]:
        column.justify = "right"
    total = totals.seconds or 1.0
    for node in totals:
        table.add_row(
            node.node,
            str(node.calls),
            f"{node.seconds:.2f}",
            f"{node.part / total:.0%}",
            f"{node.critical / total:.0%}",
        )
    return table


def _rendered(table: RenderableType) -> str:
    out = io.StringIO()
    Console(file=out, width=100, no_color=True).print(table)
    return out.getvalue().rstrip()
