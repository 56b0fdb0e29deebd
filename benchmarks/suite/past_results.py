"""Trusted comparisons, and the gates that hold a new one against them: numbers of one kind of machine, in a
file that only grows."""

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

FILE = "history.jsonl"  # beside the folders of comparisons
# in the folder of a comparison: the numbers of its gates, which `trust` adds to the history
LAST = "result.json"
OF_ROWS = ("seconds", "processor", "moved", "memory", "rate")
LOWER = ("seconds", "processor", "moved", "memory")


def kind() -> str:
    """A name for this kind of machine."""
    return hashlib.sha256(json.dumps(machine(), sort_keys=True).encode()).hexdigest()[:12]


def gate_values(suite: Suite, cells: Sequence[tuple[Row, Measured]]) -> dict[str, float | None]:
    """Gate, as ``CELL: METRIC`` → its number; None where there is none."""
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
    """Leave the numbers of a comparison's gates in its folder. ``whole``: whether all of it was done."""
    measured = folder / OBSERVATIONS
    digest = hashlib.sha256(
        measured.read_bytes() if measured.is_file() else json.dumps([str(folder), values]).encode()
    ).hexdigest()
    result = {"suite": suite.name, "machine": kind(), "whole": whole, "id": digest[:16], "values": values}
    durable.replace(folder / LAST, f"{json.dumps(result, indent=1)}\n".encode())


def trust(folder: Path) -> str:
    """Add a comparison to the history beside its folder; what was done, in words. Raises PlanError for one
    that is not whole."""
    try:
        result = json.loads(durable.read(folder / LAST))
    except (OSError, ValueError) as error:
        raise PlanError.of(
            "bench-trust",
            f"'{folder}' holds no comparison",
            found=str(error),
            expected="a folder that `rlflow bench` wrote",
            remedy="name what --out said, or bench/SUITE",
        ) from error
    missing = [name for name, value in result["values"].items() if value is None]
    if not result["whole"] or missing or not result["values"]:
        lacking = (
            "no gates"
            if not result["values"]
            else f"no number of {missing[0]}"
            if missing
            else "a comparison that was not finished"
        )
        raise PlanError.of(
            "bench-trust",
            f"the comparison in '{folder}' cannot be trusted",
            found=lacking,
            expected="a finished comparison with a number for every gate",
            remedy="finish it with the same command; [[gate]] tables of the suite say which numbers are kept",
        )
    path = folder.parent / FILE
    known = trusted(path)
    if any(one.get("id") == result["id"] for one in known):
        return f"{folder} is trusted already: what was measured counts once"
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
        remedy="make room",
    ) from error


def trusted(path: Path) -> list[dict[str, Any]]:
    """The comparisons of a history; torn lines are passed over."""
    return objects(Growing(path).lines())


def judge_gates(suite: Suite, folder: Path, values: dict[str, float | None]) -> Gated:
    """Hold the numbers of a comparison against the history beside its folder. It is not compared with itself,
    but with what was measured in the same folder before it."""
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
