"""The history of trusted comparisons, and gates that check a new comparison against it.

The history is a file to which lines are only appended. A gate uses only results from the same kind of
machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlflow.benchmarks.cells import machine
from rlflow.benchmarks.gates import Better, Gated, gated
from rlflow.benchmarks.journal import FILE as OBSERVATIONS
from rlflow.benchmarks.journal import Measured
from rlflow.benchmarks.results import Row, curves
from rlflow.benchmarks.suite import Gate, Goal, Suite
from rlflow.checkpoints import durable
from rlflow.checkpoints.logs import Growing, Log, objects
from rlflow.errors import PlanError

FILE = "history.jsonl"  # name of the history, which is next to the folders of comparisons
# in the folder of a comparison: the numbers of its gates, which `trust` appends to the history
LAST = "result.json"
OF_ROWS = ("seconds", "processor", "moved", "memory", "rate")
LOWER = ("seconds", "processor", "moved", "memory")


def kind() -> str:
    """Return a short digest that identifies this kind of machine."""
    return hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:12]


def gate_values(suite: Suite, cells: Sequence[tuple[Row, Measured]]) -> dict[str, float | None]:
    """Return the value of each gate, by ``CELL: METRIC``; None if the value is missing."""
    return {
        f"{row.name}: {gate.metric}": _value(gate, row, measured)
        for gate in suite.gates
        for row, measured in cells
        if gate.cell in (None, row.name)
    }


def _value(gate: Gate, row: Row, measured: Measured) -> float | None:
    if row.failed or not row.closes:
        return None
    if gate.metric in OF_ROWS:
        number = getattr(row, gate.metric)
        return None if number is None else float(number)
    last = [points[-1].value for points in curves(measured, Goal(metric=gate.metric)).values() if points]
    return sum(last) / len(last) if last else None


def write_result(suite: Suite, folder: Path, values: dict[str, float | None], whole: bool) -> None:
    """Write the values of a comparison's gates to the comparison's folder.

    ``whole``: whether the comparison is complete.
    """
    measured = folder / OBSERVATIONS
    digest = hashlib.sha256(
        measured.read_bytes() if measured.is_file() else json.dumps([str(folder), values]).encode()
    ).hexdigest()
    result = {"suite": suite.name, "machine": kind(), "whole": whole, "id": digest[:16], "values": values}
    durable.replace(folder / LAST, f"{json.dumps(result, indent=1)}\n".encode())


def trust(folder: Path) -> str:
    """Append a comparison to the history next to its folder, and return a sentence that says so.

    Raises PlanError if the comparison is not complete, or if the value of a gate is missing.
    """
    try:
        result = json.loads(durable.read(folder / LAST))
    except (OSError, ValueError) as error:
        raise PlanError.of(
            "bench-trust",
            f"'{folder}' does not contain a comparison",
            found=str(error),
            expected="a folder that `rlflow bench` wrote",
            remedy="name the folder given to --out, or bench/SUITE",
        ) from error
    missing = [name for name, value in result["values"].items() if value is None]
    if not result["whole"] or missing or not result["values"]:
        lacking = (
            "no gates"
            if not result["values"]
            else f"no number for {missing[0]}"
            if missing
            else "an unfinished comparison"
        )
        raise PlanError.of(
            "bench-trust",
            f"the comparison in '{folder}' cannot be trusted",
            found=lacking,
            expected="a finished comparison with a number for every gate",
            remedy="run the same command again to finish it; [[gate]] tables of the suite name the numbers",
        )
    path = folder.parent / FILE
    known = trusted(path)
    if any(one.get("id") == result["id"] for one in known):
        return f"{folder} is trusted already; the same measurements count once"
    log = Log(path, _refuse)
    log.add(json.dumps({**result, "folder": str(folder)}) + "\n")
    log.flush()
    log.close()
    count = sum(one["suite"] == result["suite"] and one["machine"] == result["machine"] for one in known) + 1
    return (
        f"{folder} is trusted: {count} comparison{'s' * (count != 1)} of '{result['suite']}' on this "
        f"kind of machine in {path}"
    )


def _refuse(error: OSError) -> None:
    raise PlanError.of(
        "bench-folder",
        "the history cannot be written",
        found=str(error.strerror),
        expected="a disk with room",
        remedy="free some disk space",
    ) from error


def trusted(path: Path) -> list[dict[str, Any]]:
    """Return the comparisons in a history file. Incomplete lines are skipped."""
    return objects(Growing(path).lines())


def judge_gates(suite: Suite, folder: Path, values: dict[str, float | None]) -> Gated:
    """Check the values of a comparison's gates against the history next to its folder.

    If the history contains this comparison itself, that entry is ignored. Earlier comparisons in the same
    folder count.
    """
    own = json.loads(durable.read(folder / LAST))["id"]
    runs = [
        run["values"]
        for run in trusted(folder.parent / FILE)
        if (run["suite"], run["machine"]) == (suite.name, kind()) and run.get("id") != own
    ]
    better: dict[str, Better] = {}
    for gate in suite.gates:
        for cell in suite.cells:
            if gate.cell in (None, cell.name):
                better[f"{cell.name}: {gate.metric}"] = gate.better or (
                    "lower" if gate.metric in LOWER else "higher"
                )
    past = {name: [run[name] for run in runs if run.get(name) is not None] for name in better}
    return gated(better, past, values)
