"""Inject faults into real runs on this machine, and count the outcomes.

    python benchmarks/chaos.py [--quick]

    injected  faults that happened: a killed process, a damaged file, a row without a score
    detected  faults that rlflow noticed and named
    survived  faults after which the run continued, was resumed to its end, or was refused, as documented
    wrong     results that differ in any bit from the same run without the fault; damaged files that were loaded
    orphans   processes that a class of faults left running

Each class runs in forked children, because importing torch takes seconds. --quick injects a few faults of each
class. Full and read-only disks are small in-memory disks, which only root can mount. Without root these classes
are skipped, and the table says so.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
# folders of tests whose modules the fault classes use
SHARED = (
    "",
    "runs",
    "checkpoints",
    "cluster",
    "rewards",
    "cli",
    "cluster/submit",
    "services/serving",
    "processes/watchdog",
)
sys.path += [str(ROOT / "tests" / folder) for folder in SHARED]

import campaign  # noqa: E402
import chaos_answers  # noqa: E402
import chaos_environments  # noqa: E402
import chaos_folders  # noqa: E402
import chaos_processes  # noqa: E402
import chaos_servers  # noqa: E402
import chaos_services  # noqa: E402
import chaos_texts  # noqa: E402
import run_faults as faults  # noqa: E402
import test_bad_days as bad_days  # noqa: E402
import test_directory as directories  # noqa: E402
import test_recovery as recoveries  # noqa: E402
from chaos_folders import all_of  # noqa: E402

from rlflow.checkpoints.writer import Writer  # noqa: E402
from rlflow.errors import PlanError  # noqa: E402
from rlflow.monitoring import status  # noqa: E402
from rlflow.monitoring.reporter import Quiet  # noqa: E402
from rlflow.runs import directory, prepare, resume  # noqa: E402
from rlflow.runs.evaluate import Evaluation  # noqa: E402

MARK = "RLFLOW_CHAOS"  # environment variable that tags this process and all processes it starts
HEADS = ("class", "injected", "detected", "survived", "wrong results", "orphans")


@dataclass
class Counts:
    """Outcome counts for one class of faults."""

    injected: int = 0
    detected: int = 0
    survived: int = 0
    wrong: int = 0

    def add(
        self, injected: bool = True, detected: bool = False, survived: bool = False, wrong: bool = False
    ) -> None:
        self.injected += injected
        self.detected += detected
        self.survived += survived
        self.wrong += wrong


@dataclass(frozen=True)
class Place:
    """The settings for one class of faults: its folder, and whether to inject only a few faults."""

    folder: Path
    quick: bool

    @property
    def task(self) -> dict[str, Any]:
        """Keyword arguments of a small run with real models."""
        data = faults.write_sums(self.folder / "sums.jsonl")
        return {
            "model": faults.MODEL,
            "data": str(data),
            "iterations": 4,
            "held_out": 0,
            "save_every": 1,
            "lr": 1e-3,
            "threads": 1,
            "out": str(self.folder / "runs"),
        }

    def of(self, items: Iterable[Any], few: int = 3) -> list[Any]:
        """Return all items; with --quick, about ``few`` of them, evenly spread over the list."""
        every = list(items)
        return every[:: -(-len(every) // few)] if self.quick else every


def straight(name: str, place: Place, **changes: Any) -> faults.Content:
    """Run without a fault, and return the results, for comparison."""
    faults.must(faults.in_child(lambda: faults.run(name, place.task, "straight", **changes)), 0)
    return faults.content(place.folder / "runs" / "straight")


def resumed(folders: Iterable[Path]) -> list[bool]:
    """Resume each run, and return whether it reached its end."""
    return [code == 0 for code in all_of(partial(resume.resume, folder, {}, Quiet()) for folder in folders)]


# -- classes
# ------------------------------------------------------------------------------------------------------------


def killed(name: str) -> Callable[[Place], Counts]:
    """Return a fault class that kills runs of algorithm ``name`` and resumes them.

    Each run is killed when a different node of its third iteration starts.
    """

    def cut(place: Place, node: str) -> None:
        faults.signal_at(node, 2, signal.SIGKILL)
        faults.run(name, place.task, node, prompts=4)

    def measured(place: Place) -> Counts:
        counts, wanted, nodes = Counts(), straight(name, place, prompts=4), place.of(faults.nodes(name))
        codes = all_of(partial(cut, place, node) for node in nodes)
        folders = [place.folder / "runs" / node for node in nodes]
        found = [status.read(folder) for folder in folders]
        for folder, code, state, ended in zip(folders, codes, found, resumed(folders), strict=True):
            counts.add(
                code == -signal.SIGKILL,
                state is not None and state.state == "died",
                ended,
                ended and differs(folder, wanted),
            )
        return counts

    return measured


def differs(folder: Path, wanted: faults.Content) -> bool:
    """Whether the results of the run in ``folder`` differ from ``wanted``."""
    return any(faults.differences(faults.content(folder), wanted))


KINDS = ("generate", *recoveries.AT, "update")  # calls of a run on pools during which a worker fails


def workers(pools: dict[str, Any]) -> Callable[[Place], Counts]:
    """Kill one worker in each iteration of a run. In another run, suspend one worker in each iteration.

    The run's call during which this happens is drawn at random, and is of a different kind in each iteration.
    The run must recover by itself.
    """

    def measured(place: Place) -> Counts:
        counts, draw, kinds = Counts(), random.Random(0), place.of(KINDS, 2)
        settings = {**pools, "iterations": len(kinds)}
        run_in_child(place.folder / "straight", {}, settings)
        wanted = recoveries.Ended.read(place.folder / "straight")
        for number in (signal.SIGKILL, signal.SIGSTOP):
            folder, at = place.folder / str(int(number)), [f"{kind}, {i}" for i, kind in enumerate(kinds)]
            run_in_child(
                folder,
                {each: [1 + draw.randrange(calls(place.folder / "straight", each))] for each in at}
                | {"signal": number},
                settings,
            )
            found = recoveries.Ended.read(folder)
            named = [note for note in found.notes if "has died" in note or "is stopped" in note]
            for i in range(len(at)):
                counts.add(
                    True, i < len(named), not found.failure, not found.failure and not found.same(wanted)
                )
        return counts

    return measured


def calls(folder: Path, place: str) -> int:
    """Return how often a run reached ``place``, a named point in rlflow's code."""
    return (folder / f"{place}.calls").stat().st_size


def run_in_child(folder: Path, fault: dict[str, Any], pools: dict[str, Any]) -> None:
    """Run on pools with a fault in a child process, which must succeed."""
    faults.must(faults.in_child(lambda: recoveries.Ended(folder, fault, pools)), 0)


PHASES: dict[str, Callable[[int], None]] = {
    "start": lambda number: faults.signal_before(prepare, "make_models", number),
    "first evaluation": lambda number: faults.signal_before(Evaluation, "__call__", number),
    "rollout": lambda number: faults.signal_at("actor.generate", 1, number),
    "reward": lambda number: faults.signal_at("reward", 1, number),
    "forward": lambda number: faults.signal_at("actor.logprobs", 1, number),
    "stage": lambda number: faults.signal_at("gae", 1, number),
    "first update": lambda number: faults.signal_at("critic.update", 1, number),
    "last update": lambda number: faults.signal_at("actor.update", 1, number),
    "save": lambda number: faults.signal_before(Writer, "submit", number, 2),
    "writing": lambda number: faults.signal_before(Writer, "_save", number, 2),
    "evaluation": lambda number: faults.signal_before(Evaluation, "__call__", number, 2),
}


EVALUATED = {"held_out": 4, "eval_every": 2, "prompts": 4, "iterations": 3}


def stopped(place: Place, phase: str, number: int) -> None:
    """Run ppo, and send the signal ``number`` in a phase of the run."""
    for one in ("first update", "last update") if phase == "twice" else (phase,):
        PHASES[one](number)
    faults.run("ppo", place.task, f"{phase}-{number}".replace(" ", "-"), **EVALUATED)


def signals(place: Place) -> Counts:
    """Send SIGINT, SIGTERM or two SIGINTs in each phase of a run, then resume the run.

    A run that has not started yet cannot be resumed.
    """
    counts, wanted = Counts(), straight("ppo", place, **EVALUATED)
    kinds = place.of(
        [(phase, int(n)) for phase in PHASES for n in (signal.SIGINT, signal.SIGTERM)]
        + [("twice", int(signal.SIGINT))],
        4,
    )
    codes = all_of(partial(stopped, place, phase, number) for phase, number in kinds)
    folders = {kind: place.folder / "runs" / f"{kind[0]}-{kind[1]}".replace(" ", "-") for kind in kinds}
    started = {kind: status.read(folder) for kind, folder in folders.items() if folder.exists()}
    ended = dict(zip(started, resumed(folders[kind] for kind in started), strict=True))
    for kind, code in zip(kinds, codes, strict=True):
        if kind not in started:  # the run was still loading models, so Python itself ends the process
            counts.add(True, code in (1, -signal.SIGTERM), kind[0] == "start")
            continue
        state = started[kind]
        seen = code == 130 and state is not None and state.state == "interrupted"
        counts.add(True, seen, ended[kind], ended[kind] and differs(folders[kind], wanted))
    return counts


def corrupted(place: Place) -> Counts:
    """Damage files of the newest checkpoint: cut, flip, zero, swap, forge or delete them.

    When it resumes, the run must use the previous checkpoint or refuse.
    """
    counts, run = Counts(), campaign.write_run(place.folder / "run")
    for corruption in place.of(campaign.corruptions(run), 40):
        outcome = campaign.outcome(run, corruption, place.folder / "scratch")
        right = outcome in ("previous", "newest", "refused")
        counts.add(True, right, right, outcome.startswith("wrong: loaded") or outcome == "wrong: silent")
    return counts


class Disk:
    """A small in-memory disk."""

    def __init__(self, path: Path, size: str) -> None:
        self.path, self.size = path, size
        path.mkdir(parents=True, exist_ok=True)

    def mount(self, options: str) -> bool:
        return (
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", options, "tmpfs", self.path], capture_output=True, check=False
            ).returncode
            == 0
        )

    def unmount(self) -> None:
        subprocess.run(["umount", self.path], capture_output=True, check=False)

    def fill(self) -> None:
        """Write to the disk until it is full."""
        with open(self.path / "filler", "ab", buffering=0) as file:
            try:
                while file.write(bytes(65536)):
                    pass
                while file.write(b"\0"):
                    pass
            except OSError:
                pass

    def empty(self) -> None:
        (self.path / "filler").unlink()


def disk_full(place: Place) -> Counts:
    """Fill the run's disk in one iteration, and empty it two iterations later. Saves in between fail."""
    counts, wanted = Counts(), straight("grpo", place, iterations=6)
    for iteration in place.of(range(1, 4), 1):
        disk = Disk(place.folder / "disk", "256m")
        disk.mount(f"size={disk.size}")

        def filled(iteration: int = iteration, disk: Disk = disk) -> None:
            faults.at("actor.update", iteration, disk.fill)
            faults.at("actor.update", iteration + 2, disk.empty)
            faults.run("grpo", place.task, "full", iterations=6, out=str(disk.path), quiet=False)

        output = faults.quietly(filled, place.folder / "said")
        folder = disk.path / "full"
        counts.add(
            True, "not saved: " in output.out, output.code == 0, output.code == 0 and unlike(folder, wanted)
        )
        disk.unmount()
    return counts


def read_only(place: Place) -> Counts:
    """Make the folder of checkpoints read-only for two iterations."""
    counts, wanted = Counts(), straight("grpo", place, iterations=6)
    for iteration in place.of(range(1, 4), 1):
        folder = place.folder / "runs" / f"fixed-{iteration}"

        def fixed(iteration: int = iteration, folder: Path = folder) -> None:
            faults.at(
                "actor.update", iteration, lambda: Disk(folder / "checkpoints", "1m").mount("ro,size=1m")
            )
            faults.at("actor.update", iteration + 2, lambda: Disk(folder / "checkpoints", "1m").unmount())
            faults.run("grpo", place.task, folder.name, iterations=6, quiet=False)

        output = faults.quietly(fixed, place.folder / "said")
        counts.add(
            True, "not saved: " in output.out, output.code == 0, output.code == 0 and unlike(folder, wanted)
        )
    return counts


def unlike(folder: Path, wanted: faults.Content) -> bool:
    """Whether a run's results differ from ``wanted``.

    Lines of metrics may be missing, because the disk was full.
    """
    found = faults.content(folder)
    same = all(line in wanted.metrics for line in found.metrics)
    return not same or found.state != wanted.state or any(faults.unequal(found.tensors, wanted.tensors))


def rewards(place: Place) -> Counts:
    """Let the reward of one row in four hang, die, raise or return an invalid score.

    Each of these rows is a fault.
    """
    counts = Counts()
    modes = {mode: place.folder / mode.replace(" ", "-") for mode in place.of(bad_days.MODES, 4)}
    for folder in modes.values():
        folder.mkdir()
    codes = all_of(
        partial(bad_days.null_run, folder, bad_days.MODES[mode][0]) for mode, folder in modes.items()
    )
    for (mode, folder), code in zip(modes.items(), codes, strict=True):
        cause, ended = bad_days.MODES[mode][1], code == 0
        for line in bad_days.lines(folder / "runs" / "grpo-1"):
            missing, named = int(line["reward/missing"]), int(line.get(f"reward/missing_bad/{cause}", 0))
            rows, left_out = int(line["actor.update/rows"]), int(line["actor.update/left_out"])
            for row in range(4):
                counts.add(True, row < named, ended and row < left_out, missing != 4 or rows + left_out != 16)
    return counts


def hung_stages(place: Place) -> Counts:
    """Run a stage that never returns. The run must end at the stage's deadline and name the stage."""
    counts = Counts()
    for number in place.of(range(5), 1):
        folder = place.folder / str(number)
        folder.mkdir()
        (folder / "stuck.py").write_text(bad_days.NEVER.replace("{action}", "pass"))
        output = faults.command(
            ["run", folder / "stuck.py", "--backend", "null", "--prompts", 4, "--out", folder],
            folder / "said",
        )
        counts.add(True, "stage 'never'" in output.err and "deadline" in output.err, output.code == 1)
    return counts


def not_finite(place: Place) -> Counts:
    """Put NaN and infinities into rows, a loss or a gradient.

    With a bad row, the run must give the same result as without that row. With a bad loss or gradient, the
    run must skip the optimizer step.
    """
    counts, without = Counts(), straight(faults.BAD, place, **{"hp.drop": True})
    kinds = [
        (where, value)
        for where in ("scores", "values", "loss", "gradient")
        for value in ("nan", "inf", "-inf")
    ]
    kinds = place.of(kinds, 4)
    codes = all_of(
        partial(
            faults.run,
            faults.BAD,
            place.task,
            where + value,
            **{"max_bad": 0, "hp.place": where, "hp.value": value},
        )
        for where, value in kinds
    )
    for (where, value), code in zip(kinds, codes, strict=True):
        found, rows = faults.content(place.folder / "runs" / (where + value)), where in ("scores", "values")
        if rows:
            seen = all(line["actor.update/left_out"] == 2 for line in found.metrics)
            wrong = any(faults.unequal(found.tensors, without.tensors))
        else:
            seen = all(
                line["actor.update/skipped_steps"] == 1 and line["actor.update/steps"] == 0
                for line in found.metrics
            )
            wrong = any(
                not tensor.isfinite().all() for group in found.tensors.values() for tensor in group.values()
            )
        counts.add(True, seen, code == 0, wrong)
    return counts


def launches(place: Place) -> Counts:
    """Start two processes on one run folder.

    One must work. The other must exit with code 3 and name the first. In every tenth case, a killed process
    has left its lock behind.
    """
    faults.must(faults.in_child(lambda: bad_days.null_run(place.folder, "return 1.0", iterations=1)), 0)
    counts, folder = Counts(), place.folder / "runs" / "grpo-1"
    for number in range(10 if place.quick else 100):
        iterations = 2 + number
        if number % 10 == 0:
            faults.must(faults.killed_holder(folder, iterations, place.folder).code, -signal.SIGKILL)
        found = faults.race(folder, iterations, place.folder)
        named = f"process {found.pids[1]} on " in found.first.err
        counts.add(
            True,
            found.first.code == 3 and named,
            found.second.code == 0,
            found.first.code == found.second.code,
        )
    done = [line["iteration"] for line in bad_days.lines(folder)]
    counts.wrong += done != list(range(counts.injected + 1))
    return counts


def paths(place: Place) -> Counts:
    """Start runs with names that would lead outside the folder of runs."""
    counts = Counts()
    for name in directories.OUTSIDE:
        inside = place.folder / "in" / "runs"
        try:
            directory.create(inside, name, "ppo")
            refused = False
        except PlanError:
            refused = True
        counts.add(
            True,
            refused,
            refused,
            any(path.is_dir() and path != inside for path in (place.folder / "in").rglob("*")),
        )
    return counts


def counted(outcomes: Callable[[Place], Iterator[chaos_folders.Outcome]]) -> Callable[[Place], Counts]:
    """Return a fault class that counts the outcomes which ``outcomes`` yields."""

    def measured(place: Place) -> Counts:
        counts = Counts()
        for outcome in outcomes(place):
            counts.add(*outcome)
        return counts

    return measured


CLASSES: dict[str, Callable[[Place], Counts]] = {
    "kill -9 at each node: ppo": killed("ppo"),
    "kill -9 at each node: grpo": killed("grpo"),
    "kill -9 at each node: repeat and state": killed(faults.ADAPTIVE),
    "one of two workers killed or stopped": workers(recoveries.TWO),
    "worker killed or stopped, sampling ahead": workers(recoveries.AHEAD),
    "SIGINT, SIGTERM in each phase": signals,
    "checkpoint damaged": corrupted,
    "disk full": disk_full,
    "checkpoints read-only": read_only,
    "reward hangs, dies or lies": rewards,
    "stage never returns": hung_stages,
    "NaN and infinities": not_finite,
    "two launches at once": launches,
    "run name outside the folder": paths,
    **{
        name: counted(outcomes)
        for module in (
            chaos_folders,
            chaos_processes,
            chaos_answers,
            chaos_servers,
            chaos_services,
            chaos_environments,
            chaos_texts,
        )
        for name, outcomes in module.CLASSES.items()
    },
}
NEED_MOUNT = (disk_full, read_only)


# -- the table
# ------------------------------------------------------------------------------------------------------------


def rows(quick: bool, chosen: str) -> Iterator[tuple[str, ...]]:
    """Yield the table's row for each fault class as soon as it is measured.

    ``quick``: inject only a few faults. ``chosen``: only run classes whose name contains this text.
    """
    mounts = can_mount()
    for name, measure in CLASSES.items():
        if chosen not in name:
            continue
        if measure in NEED_MOUNT and not mounts:
            yield (name, "not run: mounting a disk needs root", "", "", "", "")
            continue
        with tempfile.TemporaryDirectory(prefix="rlflow-chaos-", dir=fast_folder()) as folder:
            began = time.monotonic()
            counts = measure(Place(Path(folder), quick))
            print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
            orphans = faults.left_over(os.environ[MARK], MARK)
        yield (
            name,
            *(
                str(n)
                for n in (counts.injected, counts.detected, counts.survived, counts.wrong, len(orphans))
            ),
        )


def can_mount() -> bool:
    """Return whether this process may mount a disk."""
    with tempfile.TemporaryDirectory() as folder:
        disk = Disk(Path(folder), "1m")
        mounted = disk.mount("size=1m")
        if mounted:
            disk.unmount()
        return mounted


def fast_folder() -> str | None:
    """Return a folder in memory; None if there is not enough room.

    On disk, writing would take most of the time. Memory suffices, since no fault class simulates a power
    failure.
    """
    memory = Path("/dev/shm")
    return str(memory) if memory.is_dir() and shutil.disk_usage(memory).free > 4 << 30 else None


def warm_up() -> None:
    """Run once in this process to import the models' modules, so that forked children need not
    import them.
    """
    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        faults.run("ppo", Place(Path(folder), True).task, "warm", iterations=1, prompts=2)


def again_with_mark() -> None:
    """Restart this program with an environment variable as a process tag, by which its processes can be
    found.
    """
    os.environ[MARK] = uuid.uuid4().hex
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="run only classes whose name contains this text")
    options = parser.parse_args()
    if MARK not in os.environ:
        again_with_mark()
    torch.set_num_threads(1)
    # a shell makes its background processes ignore SIGINT, so set the handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    warm_up()
    print(f"| {' | '.join(HEADS)} |\n| --- {'| ---: ' * (len(HEADS) - 1)}|", flush=True)
    found = []
    for row in rows(options.quick, options.only):
        found.append(row)
        print(f"| {' | '.join(row)} |", flush=True)
    numbers = [[int(cell) for cell in row[1:]] for row in found if row[1].isdigit()]
    print(f"| all | {' | '.join(str(sum(column)) for column in zip(*numbers, strict=True))} |")
    print(f"\n{time.monotonic() - began:.0f} s; torch {torch.__version__}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
