"""Run sections that fail, as `benchmarks/gpu.py` does on a GPU, and print the checks of each."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from gpu.check import Check, holds, untested
from gpu.supervise import results


def good():
    print("this goes to its log")
    yield holds("one", True)
    yield untested("two", "no reason")


def raises():
    yield holds("one", True)
    raise ValueError("\n\n  the reason\nand more")


def crashes():
    yield holds("one", True)
    print("last words")
    sys.stdout.flush()
    os.abort()


def leaves():
    yield holds("one", True)
    os._exit(3)


def hangs(file):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    Path(file).write_text(str(child.pid))
    yield holds("one", True)
    stuck()


def stuck():
    time.sleep(100)


def main(folder: Path) -> None:
    found = {}
    for section, arguments, seconds in (
        (good, (), 30),
        (raises, (), 30),
        (crashes, (), 30),
        (leaves, (), 30),
        (hangs, (str(folder / "child"),), 3),
    ):
        checks = list(results(section, arguments, "spawn", seconds, folder / f"{section.__name__}.log"))
        assert all(isinstance(check, Check) for check in checks)
        found[section.__name__] = [(check.name, check.verdict, check.why) for check in checks]
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
