"""Check everything in rlflow that depends on a GPU, with one command and within minutes.

    python benchmarks/gpu.py                          # every section, the most important ones first
    python benchmarks/gpu.py right waits              # sections or groups of sections, by name
    python benchmarks/gpu.py --list
    python benchmarks/gpu.py --json gpu.json --budget 540
    python benchmarks/gpu.py --device cpu --small     # the checks that a CPU can do, in seconds

The command uses rlflow from this checkout, installed or not. It needs only rlflow's own dependencies, and no
network, model or data. If Ray, DeepSpeed, vLLM, TRL or peft is missing, its sections are untested. Each
section runs in its own process with a deadline. If a section raises, crashes or hangs, the command reports
the cause.

Every check has a number, a bound if there is one, and a verdict: ok, failed or untested. The exit code is 1
if a check failed, and 2 if the device does not exist.
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
SLOWER = 3  # on a CPU, a section's deadline is multiplied by this
LEAST = 5.0  # a section starts only if the budget has more seconds left
LOG = 6000  # characters of a failed section's output in the JSON file
FACTS = 90.0  # most seconds for describing the machine


def from_checkout(folder: Path) -> None:
    """Make this process and its children import rlflow from this checkout, through links in ``folder``.

    In the checkout, algorithms, backends and benchmarks are next to the package. In an installation, they are
    inside the package, so the links place them there. The working directory must not be the checkout. Python
    also imports from the working directory, and would find the checkout's folder `rlflow`, which lacks these
    packages.
    """
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
    """Set the environment variables that sections need."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    # with this variable, PyTorch detects a GPU without creating a context on it
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # as the `rlflow` command sets it
    if device == "cpu":
        os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are small


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sections", nargs="*", help="names of sections or groups (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--small", action="store_true", help="small models and few rows, for a quick run on a CPU"
    )
    parser.add_argument("--json", type=Path, help="write all checks and facts about the machine to this file")
    parser.add_argument(
        "--budget",
        type=float,
        default=540.0,
        help="seconds for all sections; sections beyond the budget are untested",
    )
    parser.add_argument("--list", action="store_true", help="list the sections")
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
            parser.error(f"there is no section {error}; --list shows all sections")
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
                # write the file after each section, in case the machine is taken away
                write(given.json, facts, words, rows)

    # only one section at a time uses a device
    with ThreadPoolExecutor(2 if given.device == "cpu" and given.small else 1) as turns:
        list(turns.map(one, rows, sections))
    print(f"\n{table(rows)}\n\n{time.monotonic() - began:.0f} s in total", flush=True)
    return int(any(row.verdict == "failed" for row in rows))


def about(device: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Return (facts about the machine, start method for section processes).

    On a GPU, this is the first start method with which a process could use the GPU. A forked process cannot
    use a GPU that its parent has used, and importing a library may already use it.
    """
    from gpu.check import Check
    from gpu.report import machine
    from gpu.supervise import results

    if device == "cpu":
        return next(machine(device)), "forkserver"
    try:
        ctypes.CDLL("libcuda.so.1")  # this does not use the GPU
    except OSError as error:
        return {"error": f"there is no NVIDIA driver: {error}"}, "spawn"
    found: dict[str, Any] = {}
    for start in ("forkserver", "spawn"):
        [answer, *_] = results(machine, (device,), start, FACTS, folder / "machine.log")
        if not isinstance(answer, Check):
            return answer, start
        found = {"error": answer.why}
    return found, start


def say(row: Any, section: Any, ground: Any, left: float) -> None:
    """Run a section, and print each check as soon as it is made.

    ``row``: the section's results, to which the checks are added. ``left``: seconds left in the budget.
    """
    from gpu.check import untested
    from gpu.supervise import checks

    began = time.monotonic()
    limit = section.seconds * (1 if ground.gpu else SLOWER)
    found = (
        checks(section, ground, min(limit, left))
        if left > LEAST
        else iter([untested(row.name, "the budget is used up")])
    )
    for check in found:
        if check.name == "deadline" and left < limit:
            check = untested("remaining checks", "the budget was used up before the section ended")
        row.checks.append(check)
        print(f"{row.name:11} {check}", flush=True)
    row.seconds = time.monotonic() - began
    log = ground.folder / f"{row.name}.log"
    if row.verdict == "failed" and log.exists():
        row.log = log.read_text(errors="replace")[-LOG:]


if __name__ == "__main__":
    sys.exit(main())
