"""Measure the cost of proofs: short runs with and without the quick proof, a complete packaged run,
and `rlflow prove`.
"""

from __future__ import annotations

import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

SHORT = ("--iterations", "2", "--held_out", "0", "--save_every", "0")
QUICK_SECONDS = re.compile(r"^proof before iteration 1: .* in ([\d.]+) s", re.MULTILINE)


class Use(NamedTuple):
    """The seconds of one process, and its output."""

    wall: float
    processor: float
    printed: str


def command(*words: str) -> Use:
    """Run an `rlflow` command. Raises CalledProcessError if it fails."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "rlflow.cli.main", *words], capture_output=True, text=True, check=True
    )
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Use(
        wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout + done.stderr
    )


def in_turns(name: str, rounds: int, folder: str) -> dict[str, list[Use]]:
    """Alternate short runs with and without the quick proof.

    Returns what the runs used, by "off" and "quick".
    """
    uses: dict[str, list[Use]] = {"off": [], "quick": []}
    for number in range(rounds):
        for prove in list(uses)[:: 1 if number % 2 else -1]:
            uses[prove].append(command("run", name, *SHORT, "--prove", prove, "--out", folder))
    return uses


def cost_text(name: str, rounds: int) -> str:
    """Measure the cost of proofs for one algorithm, and return lines of text about it."""
    with tempfile.TemporaryDirectory() as folder:
        whole = command("run", name, "--out", folder)  # this run also fills the file cache for the short runs
        uses = in_turns(name, rounds, folder)
    quick_seconds = float(QUICK_SECONDS.findall(whole.printed)[0])
    more = [
        sorted(quick[at] - off[at] for quick, off in zip(uses["quick"], uses["off"], strict=True))
        for at in (0, 1)
    ]
    turns = ", ".join(
        f"{statistics.median(each):+.2f} s {what} ({each[0]:+.2f} to {each[-1]:+.2f})"
        for each, what in zip(more, ("wall", "processor"), strict=True)
    )
    return (
        f"{name}: the packaged run takes {whole.wall:.1f} s, and its quick proof {quick_seconds:.2f} s: "
        f"{100 * quick_seconds / whole.wall:.2f} %\n"
        f"    short runs with it minus those without it, median and range of {rounds} rounds: {turns}\n"
        f"    rlflow prove {name} takes {command('prove', name).wall:.1f} s"
    )
