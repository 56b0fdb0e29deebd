"""`rlflow explain`: why a run learns little, most important reason first, and what limited its speed.

It also provides the line in other views that points to `rlflow explain`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlflow.checkpoints import durable
from rlflow.checkpoints.logs import read_object
from rlflow.monitoring.diagnosis.evidence import Evidence
from rlflow.monitoring.diagnosis.findings import LEAST, Finding, findings
from rlflow.monitoring.diagnosis.proved import falsified
from rlflow.monitoring.funnel import funnel_lines
from rlflow.monitoring.keys import by_figure
from rlflow.monitoring.recorded import Recorded, recorded

PROOF = "proof.json"  # file with the claims that the run tested before its first iteration
WORDS = 3  # how many lines at the end of bounds.txt say what limited the run's speed


def evidence_of(run: Recorded) -> Evidence:
    """Return a run's settings and recorded iterations.

    If an iteration was recorded twice, the later record is used.
    """
    figures = [
        (number, by_figure(values, run.table))
        for number, values in sorted(dict(run.history.iterations).items())
    ]
    return Evidence(figures, run.settings)


def reasons_of(run: Recorded) -> list[Finding]:
    """Return the reasons why a run learns little.

    Claims that its proof falsified come first, then findings from its metrics.
    """
    claims = falsified(read_object(run.folder / PROOF))
    return [*(claim.finding() for claim in claims), *findings(evidence_of(run))]


def explanation(folder: Path) -> list[str]:
    """Return the lines of `rlflow explain` for a run. Never raises; unreadable files count as missing."""
    run = recorded(folder)
    reasons = reasons_of(run)
    return [
        (
            f"{run.name}: {run.summary.flow}, {run.summary.state}, {run.summary.iteration} of "
            f"{run.summary.iterations} iterations"
        ),
        *_learning(run, reasons),
        *_last_funnel(run),
        *_time(folder),
    ]


def as_json(folder: Path) -> dict[str, Any]:
    """Return the output of `rlflow explain --json` as plain values.

    It contains the findings with their evidence and thresholds, and bounds.json.
    """
    run = recorded(folder)
    return {
        "run": str(run.folder),
        "flow": run.summary.flow,
        "state": run.summary.state,
        "iterations": run.summary.iteration,
        "findings": [finding.as_json() for finding in reasons_of(run)],
        "bounds": read_object(folder / "bounds.json"),
    }


def pointer(folder: Path, shown: str = "") -> str | None:
    """Return a line with the run's first alarm that points to `rlflow explain`, or None if there is none.

    ``shown``: the folder as the user would write it.
    """
    alarm = next((finding for finding in reasons_of(recorded(folder)) if finding.alarm), None)
    return None if alarm is None else f"alarm: {alarm.words}; for details: rlflow explain {shown or folder}"


def _learning(run: Recorded, reasons: list[Finding]) -> list[str]:
    if not reasons:
        few = len(run.history.iterations) < LEAST
        return [
            f"learning: {f'no findings, since the run has fewer than {LEAST} iterations' if few else 'none of the rules finds a problem'}"
        ]
    return [f"{'alarm' if finding.alarm else 'advice'}: {finding}" for finding in reasons]


def _last_funnel(run: Recorded) -> list[str]:
    lines = funnel_lines(run.summary.figures)
    return ["the last iteration:", *(f"  {line}" for line in lines)] if lines else []


def _time(folder: Path) -> list[str]:
    lines = bound_lines(folder)
    return (
        ["time:", *(f"  {line}" for line in lines)]
        if lines
        else ["time: its limit is known when the run has ended"]
    )


def bound_lines(folder: Path) -> list[str]:
    """Return the end of bounds.txt, which says what limited the run's speed. Empty until the run ends."""
    try:
        return durable.read(folder / "bounds.txt").decode(errors="replace").splitlines()[-WORDS:]
    except OSError:
        return []
