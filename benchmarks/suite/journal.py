"""The journal of a comparison: a file of JSON lines. Lines are only appended.

All tables are computed from the journal. A comparison that was killed resumes from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.checkpoints.logs import Growing, Log, objects
from rlflow.errors import PlanError

FILE = "observations.jsonl"


def refuse(error: OSError) -> None:
    """Raise the PlanError for a journal that cannot be written. ``error``: the cause."""
    raise PlanError.of(
        "bench-folder",
        "the measurements cannot be written",
        found=str(error.strerror),
        expected="a disk with room",
        remedy="choose another --out",
    ) from error


class Journal:
    """Writes the journal. Each line is a JSON object with a cell's key."""

    def __init__(self, folder: Path) -> None:
        self._log = Log(folder / FILE, refuse)

    def add(self, key: str, seed: int, kind: str, **values: Any) -> None:
        """Append a line about a cell.

        ``key``: the cell's key. ``kind``: the kind of line. ``values``: its content.
        """
        self._log.add(json.dumps({"key": key, "seed": seed, "kind": kind, **values}) + "\n")

    def close(self) -> None:
        """Write all lines to the disk and close the file."""
        self._log.flush()
        self._log.close()


@dataclass
class Turn:
    """The measurements of one turn of a cell."""

    seed: int
    round: int
    iterations: list[dict[str, Any]]  # number, wall seconds, tokens and metrics of each iteration
    evaluations: list[dict[str, Any]]
    processor: float  # CPU seconds of the turn
    memory: int  # peak bytes of the cell until the end of the turn
    load: float  # load average of the machine at the start of the turn
    timed: list[int]  # numbers of those iterations that are timed
    seconds: float = 0.0  # seconds of the complete turn, with evaluations


@dataclass
class Measured:
    """All measurements of a cell in the journal."""

    turns: list[Turn] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # seed → cause of its failure
    done: set[int] = field(default_factory=set)  # finished seeds
    # seed → the system's last answer to `observe`
    observed: dict[int, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # the answer to the last request `prepare`
    # seed → seconds to start and prepare its process, summed over all starts
    starts: dict[int, float] = field(default_factory=dict)


def read(folder: Path) -> dict[str, Measured]:
    """Return the measurements of each cell, by the cell's key. Incomplete lines are skipped."""
    cells: dict[str, Measured] = {}
    for line in objects(Growing(folder / FILE).lines()):
        cell = cells.setdefault(line.pop("key"), Measured())
        kind, seed = line.pop("kind"), line["seed"]
        if kind == "turn":
            cell.turns.append(Turn(**line))
            cell.failed.pop(seed, None)
        elif kind == "failed":
            cell.failed[seed] = line["cause"]
        elif kind == "observed":
            cell.observed[seed] = line["values"]
        elif kind == "done":
            cell.done.add(seed)
        elif kind == "facts":
            cell.facts = line["values"]
            cell.starts[seed] = cell.starts.get(seed, 0.0) + line.get("seconds", 0.0)
    return cells
