"""What a run on pools costs from its start to its end: `python benchmarks/starts.py [--rounds 5]`.

Runs the command of one iteration on the null backend in one process, on two ranks that are threads, and on
two Ray workers, in turns, and prints the wall seconds of each whole command: their median, least and most.
Other work on the machine lengthens all three.
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
    """The wall seconds of the command with these flags."""
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        subprocess.run([*COMMAND, *flags, "--out", out], check=True, stdout=subprocess.DEVNULL)
        return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is run")
    rounds = parser.parse_args().rounds
    found = [{way: seconds(flags) for way, flags in WAYS.items()} for _ in range(rounds)]
    for way in WAYS:
        each = [one[way] for one in found]
        print(f"{way}: {statistics.median(each):.1f} s ({min(each):.1f} to {max(each):.1f})")


if __name__ == "__main__":
    main()
