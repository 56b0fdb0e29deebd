"""`rlflow bench`: compare runs, settings and systems."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from json import dumps, loads
from pathlib import Path

from rlflow.benchmarks.by_seed import curve_rows, seed_rows
from rlflow.benchmarks.cells import compile_cells
from rlflow.benchmarks.journal import Measured, read
from rlflow.benchmarks.lengths import recorded_lengths
from rlflow.benchmarks.past_results import gate_values, judge_gates, trust, write_result
from rlflow.benchmarks.report import Learned, as_json, markdown, printed
from rlflow.benchmarks.results import Row, row
from rlflow.benchmarks.runner import Runner, stderr
from rlflow.benchmarks.suite import Goal, Suite, find_suite, read_suite, with_files
from rlflow.benchmarks.verdicts import decided, verdicts
from rlflow.checkpoints import durable
from rlflow.checkpoints.lock import Lock
from rlflow.cli.plan import options_of
from rlflow.errors import PlanError
from rlflow.monitoring.tables import output, plain
from rlflow.processes.watchdog.signals import ending_at_once

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


CELLS = "cells.json"  # maps the name of each cell of a comparison to its key


def bench(
    name: str,
    out: str | None,
    budget: str | None,
    json: bool,
    markdown_file: str | None,
    against: str | None = None,
) -> int:
    """Run the measurements of a suite that are still missing, then print its table and verdicts.

    Returns 1 if a cell or a gate failed or the row accounting doesn't add up, else 0. ``name``: a suite's
    name or file. The other arguments are those of `rlflow bench`. Raises FlowError and PlanError.
    """
    seconds = duration(budget) if budget is not None else None
    suite = read_suite(find_suite(name))
    other = None if against is None else compared(Path(against))
    folder = Path(out) if out is not None else Path("bench") / suite.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PlanError.of(
            "bench-folder",
            f"the folder '{folder}' cannot be created",
            found=str(error.strerror),
            expected="a folder",
            remedy="choose another --out",
        ) from error
    with Lock(folder):
        suite = with_files(suite, made(suite, folder))
        cells = compile_cells(suite, options_of)
        keys = {cell.key: cell.cell.name for cell in cells}
        durable.replace(folder / CELLS, dumps(keys).encode())

        def is_decided(measured: dict[str, Measured]) -> bool:
            return decided(suite, [(keys[key], measured.get(key, Measured())) for key in keys])

        complete = run_until_stopped(Runner(suite, cells, folder, stderr, is_decided, seconds))
        measured = {cell.cell.name: read(folder).get(cell.key, Measured()) for cell in cells}
        rows = [row(cell.cell.name, cell.key, measured[cell.cell.name], suite.goal) for cell in cells]
        values = gate_values(suite, [(one, measured[one.name]) for one in rows])
        write_result(suite, folder, values, complete)
    sentences, gates = verdicts(suite, list(measured.items())), judge_gates(suite, folder, values)
    notes = [gate.text for gate in gates.gates]
    notes += [] if other is None else [*compared_lines(rows, Path(against or ""), other)]
    notes += [] if complete else [f"the budget of {budget} is used up: the same command continues from here"]
    learned = Learned(seed_rows(measured.items(), suite.goal), curve_rows(measured.items(), suite.goal))
    if markdown_file is not None:
        durable.replace(Path(markdown_file), markdown(suite, rows, sentences, notes, learned).encode())
    if json:
        print(as_json(suite, cells, rows, sentences, notes, learned))
    else:
        output(printed(suite, rows, sentences, notes, learned))
    return int(any(one.failed or not one.closes for one in rows) or (complete and gates.exit_code == 1))


def run_until_stopped(runner: Runner) -> bool:
    """Run all remaining measurements. Returns False if the time budget runs out first.

    Ctrl-C or another stop signal raises KeyboardInterrupt with a message that says how to continue.
    """
    try:
        with ending_at_once():
            return runner.run()
    except KeyboardInterrupt as stop:
        raise KeyboardInterrupt(
            f"stopped; the measurements so far are in {runner.folder}, and the same command continues"
        ) from stop


def compared(folder: Path) -> dict[str, str]:
    """Return the key of each cell in the comparison in ``folder``, by the cell's name.

    Raises PlanError if there is no comparison in the folder.
    """
    try:
        return {name: key for key, name in loads(durable.read(folder / CELLS)).items()}
    except (OSError, ValueError) as error:
        raise PlanError.of(
            "bench-against",
            f"'{folder}' does not contain a comparison",
            found=str(error),
            expected="a folder that `rlflow bench` wrote",
            remedy="name the folder given as --out, or bench/SUITE",
        ) from error


def compared_lines(rows: Sequence[Row], folder: Path, names: dict[str, str]) -> Iterator[str]:
    """Yield a line for each cell that compares it with the cell of the same name in ``folder``.

    ``rows``: the cells of this comparison. ``names``: the keys of the cells in ``folder``, as ``compared``
    returns them.
    """
    known = read(folder)
    for one in rows:
        earlier = row(
            one.name, names.get(one.name, ""), known.get(names.get(one.name, ""), Measured()), Goal()
        )
        if one.seconds is None or earlier.seconds is None:
            yield f"{one.name}: {folder} has no seconds per iteration to compare with"
        else:
            ratio = one.seconds / earlier.seconds
            yield (
                f"{one.name}: {one.seconds:.3f} s an iteration, {earlier.seconds:.3f} in {folder}, ratio "
                f"{ratio:.2f}; the measurements did not alternate, so this is not a verdict"
            )


def trust_folders(folders: Sequence[str]) -> int:
    """Add comparisons to the history file next to their folders. Returns 0.

    Raises PlanError if no folder is given or one doesn't contain a comparison.
    """
    if not folders:
        raise PlanError.of(
            "bench-trust",
            "the folder of a comparison is missing",
            found="rlflow bench trust",
            expected="rlflow bench trust FOLDER …",
            remedy="name the folder given as --out, or bench/SUITE",
        )
    for folder in folders:
        output([plain(trust(Path(folder)))])
    return 0


def record_lengths(files: Sequence[str], out: str | None) -> int:
    """Write the lengths of sampled answers to ``out``, a file for --ROLE.generate.lengths. Returns 0.

    ``files``: a single file with an evaluation's answers. Raises PlanError if there is more or less than one,
    or if ``out`` is None.
    """
    if len(files) != 1 or out is None:
        raise PlanError.of(
            "bench-record",
            "the file of answers or the file to write is missing",
            found=" ".join(["rlflow bench record", *files]),
            expected="rlflow bench record ANSWERS.jsonl -o LENGTHS.json",
            remedy="name a file of evaluations/, and -o FILE",
        )
    lengths = recorded_lengths(Path(files[0]))
    durable.replace(Path(out), (dumps({"source": files[0], "lengths": lengths}) + "\n").encode())
    mean = sum(lengths) / len(lengths)
    output([plain(f"{out}: {len(lengths)} lengths from {min(lengths)} to {max(lengths)}, mean {mean:.1f}")])
    return 0


def made(suite: Suite, folder: Path) -> Path:
    """Return the folder with the files that the suite's generator script writes.

    Runs the script if the folder doesn't exist yet, and raises PlanError if it fails.
    """
    place = (folder / "made").absolute()
    if suite.maker is None or place.is_dir():
        return place
    aside = durable.aside(place)
    aside.mkdir()
    done = subprocess.run([sys.executable, str(suite.maker), str(aside)], capture_output=True, text=True)
    if done.returncode:
        raise PlanError.of(
            "suite",
            f"{suite.maker}, which generates the files of the suite '{suite.name}', failed",
            found=done.stderr.strip() or f"exit code {done.returncode}",
            expected="exit code 0",
            remedy=f"run it alone: python {suite.maker} FOLDER",
        )
    durable.take_place(aside, place)
    return place


def duration(text: str) -> float:
    """Return the seconds in a string such as 90s, 25m or 1h30m. Raises PlanError for any other string."""
    if not text or not re.fullmatch(r"(\d+(\.\d+)?[smh])+", text):
        raise PlanError.of(
            "budget",
            "--budget is not a duration",
            found=text,
            expected="a number and its unit, such as 90s, 25m or 1h30m",
            remedy="--budget 25m",
        )
    return sum(float(amount) * UNITS[unit] for amount, unit in re.findall(r"(\d+(?:\.\d+)?)([smh])", text))
