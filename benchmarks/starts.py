"""Measure the time of a run command with and without pools: `python benchmarks/starts.py [--rounds 5]`.

A run of one iteration on the null backend uses one process, two ranks in threads, or two Ray workers. These
three variants alternate. Prints the median, minimum and maximum wall seconds of each command. Other work on
the machine makes all three slower.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time

COMMAND = (
    sys.executable,
    "-m",
    "rlflow.cli.main",
    "run",
    "grpo",
    "--backend",
    "null",
    "--iterations",
    "1",
    "--quiet",
)
WAYS = {
    "one process": (),
    "two ranks in threads": ("--pools", "all=2@threads"),
    "two Ray workers": ("--pools", "all=2"),
}


def seconds(flags: tuple[str, ...]) -> float:
    """Return the wall seconds of the command with these flags."""
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        subprocess.run([*COMMAND, *flags, "--out", out], check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of runs of each variant")
    rounds = parser.parse_args().rounds
    found = [{way: seconds(flags) for way, flags in WAYS.items()} for _ in range(rounds)]
    for way in WAYS:
        each = [one[way] for one in found]
        print(f"{way}: {statistics.median(each):.1f} s ({min(each):.1f} to {max(each):.1f})")


if __name__ == "__main__":
    main()
