"""The record of a comparison: a file of lines that only grows, from which every table is made, and from which
a killed one goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.checkpoints.logs import Growing, Log, objects
from rlflow.errors import PlanError

FILE = "observations.jsonl"


def refuse(error: OSError) -> None:
    """Raises PlanError for a disk that does not take the record."""
    raise PlanError.of(
        "bench-folder",
        "what was measured cannot be written",
        found=str(error.strerror),
        expected="a disk with room",
        remedy="choose another --out",
    ) from error


class Journal:
    """Writes lines of a comparison, each a JSON object that names the cell's key."""

    def __init__(self, folder: Path) -> None:
        self._log = Log(folder / FILE, refuse)

    def add(self, key: str, seed: int, kind: str, **values: Any) -> None:
        """Add a line."""
        self._log.add(json.dumps({"key": key, "seed": seed, "kind": kind, **values}) + "\n")

    def close(self) -> None:
        """Put everything on the disk."""
        self._log.flush()
        self._log.close()


@dataclass
class Turn:
    """A turn of a cell, as it was measured."""

    seed: int
    round: int
    iterations: list[dict[str, Any]]  # of each its number, wall seconds, tokens and metrics
    evaluations: list[dict[str, Any]]
    processor: float  # seconds of processor time of the turn
    memory: int  # the most bytes until its end
    load: float  # of the machine when it began, in running processes
    timed: list[int]  # the numbers of the iterations whose seconds count
    seconds: float = 0.0  # of the whole turn, with evaluations


@dataclass
class Measured:
    """All that is known of a cell."""

    turns: list[Turn] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)  # seed → cause
    done: set[int] = field(default_factory=set)  # seeds that came to their end
    # seed → the last that the system said of itself
    observed: dict[int, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  # of its last preparation
    # seed → seconds until its process could begin, of all starts
    starts: dict[int, float] = field(default_factory=dict)


def read(folder: Path) -> dict[str, Measured]:
    """Key → what was measured. A line that is torn is passed over; an iteration that was measured again
    counts as it was the first time."""
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
