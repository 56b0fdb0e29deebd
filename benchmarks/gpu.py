"""Everything in which a GPU has a say, checked by one command, for a GPU that is at hand for minutes.

    python benchmarks/gpu.py                          # every section, those first that matter most
    python benchmarks/gpu.py right waits              # sections and groups of them, by name
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --json gpu.json --budget 540
    python benchmarks/gpu.py --device cpu --small     # what of it a CPU can do, in seconds

It takes rlflow from this checkout, installed or not, and needs nothing but what rlflow itself does: no
network, no model, no data. Sections for Ray, DeepSpeed, vLLM, TRL and peft say that they are untested where
these are missing. Each section runs in a process of its own with a deadline, and a section that raises,
crashes or hangs is told with its cause.

Every check has a number, its bound where it has one, and a verdict: ok, failed or untested. Exits 1 where one
failed, and 2 where there is no such device.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SLOWER = 3  # times its deadline that a section has on a CPU, which has other things to do
LEAST = 5.0  # seconds of the budget for which a section is begun
LOG = 6000  # characters of what a failed section printed that the JSON file has
FACTS = 90.0  # seconds in which a machine says what it is


def from_checkout(folder: Path) -> None:
    """Let this process, and all that it starts, import rlflow from this checkout. Its algorithms and backends
    lie beside the package, as an installation maps them: a folder of links does the same. Whoever calls this
    has to work outside the checkout, whose `rlflow` lacks
    them: Python looks for modules of some processes where they start."""
    package = folder / "site" / "rlflow"
    package.mkdir(parents=True)
    mapped = {
        "algorithms": ROOT / "algorithms",
        "backends": ROOT / "backends",
        "benchmarks": ROOT / "benchmarks" / "suite",
    }
    for name, path in {path.name: path for path in (ROOT / "rlflow").iterdir()}.items() | mapped.items():
        if name != "__pycache__":
            (package / name).symlink_to(path)
    others = os.environ.get("PYTHONPATH", "")
    places = [str(package.parent), str(ROOT / "benchmarks")]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, *([others] if others else [])])
    sys.path[:] = [
        *places,
        *(place for place in sys.path if Path(place or ".").resolve() not in (ROOT, ROOT / "benchmarks")),
    ]


def prepared(device: str) -> None:
    """The environment in which sections run."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    # to ask whether there is a GPU without touching it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as `rlflow` has it
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help="names of sections or groups; without, all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="models and rows for a moment on a CPU")
    parser.add_argument("--json", type=Path, help="the file that gets every check, and the machine")
    parser.add_argument(
        "--budget",
        type=float,
        default=540.0,
        help="seconds for all sections; those that come too late are untested",
    )
    parser.add_argument("--list", action="store_true", help="say which sections there are")
    given = parser.parse_args(words)
    given.json = given.json and given.json.absolute()
    with tempfile.TemporaryDirectory(prefix="rlflow-gpu-") as folder, contextlib.chdir(folder):
        from_checkout(Path(folder))
        prepared(given.device)
        from gpu.catalogue import SECTIONS, chosen

        if given.list:
            print(
                "\n".join(
                    f"{section.name:12} {section.group:8} {section.seconds:4.0f} s  {section.what}"
                    for section in SECTIONS
                )
            )
            return 0
        try:
            sections = chosen(given.sections, given.device == "cpu" and given.small)
        except KeyError as error:
            parser.error(f"there is no section {error}; --list says which there are")
        return run(sections, given, Path(folder), words if words is not None else sys.argv[1:])


def run(sections: Any, given: argparse.Namespace, folder: Path, words: list[str]) -> int:
    from gpu.ground import Ground
    from gpu.report import Row, table, write

    began = time.monotonic()
    facts, start = about(given.device, folder)
    ground = Ground(given.device, given.small, folder, start)
    print(
        " · ".join(str(facts[name]) for name in ("device", "driver", "python", "error") if name in facts),
        flush=True,
    )
    if "error" in facts:
        return 2
    rows, writing = [Row(section.name, section.group, section.what) for section in sections], threading.Lock()

    def one(row: Row, section: Any) -> None:
        say(row, section, ground, given.budget - (time.monotonic() - began))
        if given.json:
            with writing:
                write(given.json, facts, words, rows)  # after each, since machines are taken away

    # a device has one at a time
    with ThreadPoolExecutor(2 if given.device == "cpu" and given.small else 1) as turns:
        list(turns.map(one, rows, sections))
    print(f"\n{table(rows)}\n\n{time.monotonic() - began:.0f} s in all", flush=True)
    return int(any(row.verdict == "failed" for row in rows))


def about(device: str, folder: Path) -> tuple[dict[str, Any], str]:
    """The machine, and how its processes are started: on a GPU as one could that asked it what it is. Whoever
    is forked from a process that has touched a GPU cannot, and what libraries do when they are loaded is
    theirs."""
    from gpu.check import Check
    from gpu.report import machine
    from gpu.supervise import results

    if device == "cpu":
        return next(machine(device)), "forkserver"
    try:
        ctypes.CDLL("libcuda.so.1")  # which touches no GPU
    except OSError as error:
        return {"error": f"there is no NVIDIA driver: {error}"}, "spawn"
    found: dict[str, Any] = {}
    for start in ("forkserver", "spawn"):
        [told, *_] = results(machine, (device,), start, FACTS, folder / "machine.log")
        if not isinstance(told, Check):
            return told, start
        found = {"error": told.why}
    return found, start


def say(row: Any, section: Any, ground: Any, left: float) -> None:
    """Run a section, and say what it finds as it comes."""
    from gpu.check import untested
    from gpu.supervise import checks

    began = time.monotonic()
    limit = section.seconds * (1 if ground.gpu else SLOWER)
    found = (
        checks(section, ground, min(limit, left))
        if left > LEAST
        else iter([untested(row.name, "the budget is spent")])
    )
    for check in found:
        if check.name == "deadline" and left < limit:
            check = untested("the rest", "the budget was spent before its end")
        row.checks.append(check)
        print(f"{row.name:11} {check}", flush=True)
    row.seconds = time.monotonic() - began
    log = ground.folder / f"{row.name}.log"
    if row.verdict == "failed" and log.exists():
        row.log = log.read_text(errors="replace")[-LOG:]


if __name__ == "__main__":
    sys.exit(main())
