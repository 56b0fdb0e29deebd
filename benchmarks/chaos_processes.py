"""Faults of processes: stages that crash or hang, forks, child processes, signals, and Ray's processes.

Runs start as if from a shell, on the null backend. Each function yields the outcomes of a class of faults,
for the table of ``chaos.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import run_faults as faults
from chaos_folders import Outcome, Place
from process_faults import Launched, came_to, launch, resumed

from rlflow.processes.watchdog import process_tag

POOLS = ("--pools", "all=1")
STAGE = {  # fault of a stage → text that the run must print
    "hold": "keeps the interpreter's lock",
    "sys.exit": "SystemExit: 0",
    "interrupt": "KeyboardInterrupt",
    "os._exit": "os._exit(0)",
    "C exit": "exited with code 0",
    "segfault": "SIGSEGV",
}
ON_POOLS = {name: STAGE[name] for name in ("sys.exit", "interrupt", "os._exit")} | {
    "hold": "'judge'",
    "C exit": "has died",
}
FORKS: tuple[dict[str, str], ...] = (
    {"fault": "fork"},
    {"fault": "fork and exit"},
    {"reward": "returns"},
    {"reward": "exits"},
)
STARTS: tuple[dict[str, str], ...] = (
    {"fault": "daemon", "reward": "child"},
    {"fault": "stays", "reward": "daemon"},
)
ENDS = ("done", "launcher killed", "run killed", "watchdog killed")
SLOW = ("--generate_seconds", 0.1)  # slows the run down, so that it is still active when a fault happens
FOREVER = 100_000  # iterations that a test never finishes


def straight(place: Place, iterations: int = 6) -> faults.Content:
    """Run without a fault, and return the results, for comparison."""
    run = launch(place.folder, f"straight-{iterations}", iterations=iterations)
    faults.must(run.ended(), 0)
    return came_to(run.run)


def unlike(run: Launched, wanted: faults.Content) -> bool:
    """Whether the results of a run differ from ``wanted``."""
    return any(faults.differences(came_to(run.run), wanted))


def resumed_outcome(run: Launched, wanted: faults.Content, detected: bool) -> Outcome:
    """Resume a run to its end, and return the outcome.

    ``wanted``: results without the fault. ``detected``: whether the run has noticed the fault.
    """
    ended = resumed(run).ended(240) == 0
    return Outcome(True, detected, ended, ended and unlike(run, wanted))


def stages(place: Place) -> Iterator[Outcome]:
    """Let a stage exit the process, raise KeyboardInterrupt, crash, or hold the interpreter lock in C code.

    The run must fail and name the stage. It is then resumed.
    """
    wanted = straight(place)
    for fault in place.of(STAGE, 3):
        run = launch(place.folder, fault.replace(" ", "-"), fault=fault)
        code = run.ended()
        named = STAGE[fault] in run.output() and "'judge'" in run.output() and run.status["state"] == "failed"
        yield resumed_outcome(run, wanted, named and code in (1, -signal.SIGSEGV))


def stages_on_pools(place: Place) -> Iterator[Outcome]:
    """Inject the faults of ``stages`` on a worker.

    If only the worker dies, the run must recover by itself.
    """
    wanted = straight(place)
    for fault in place.of(ON_POOLS, 2):
        run = launch(place.folder, fault.replace(" ", "-"), *POOLS, fault=fault)
        code = run.ended(240)
        named = ON_POOLS[fault] in run.output()
        yield (
            Outcome(True, named, True, unlike(run, wanted))
            if code == 0
            else resumed_outcome(run, wanted, named and code == 1)
        )


def forks(place: Place) -> Iterator[Outcome]:
    """Let a stage or a reward fork. The child returns or exits.

    The run must give the same results as without the fork.
    """
    wanted = straight(place)
    for what in place.of(FORKS, 2):
        run = launch(place.folder, "-".join(what.values()).replace(" ", "-"), **what)
        ended = run.ended() == 0
        yield Outcome(True, True, ended, ended and came_to(run.run).metrics != wanted.metrics)


def started_ones(place: Place) -> Iterator[Outcome]:
    """Let stages and rewards start processes, some in their own sessions.

    These processes must end with the run.
    """
    kinds = place.of([(end, number) for end in ENDS for number in range(len(STARTS))], 3)
    for end, number in kinds:
        name, done = f"{end.replace(' ', '-')}-{number}", end == "done"
        run = launch(
            place.folder,
            name,
            iterations=6 if done else FOREVER,
            save_every=2 if done else FOREVER,
            **STARTS[number],
        )
        run.reaches(4)
        if end == "run killed":
            os.kill(run.driver, signal.SIGKILL)
        elif end == "launcher killed":
            os.kill(run.pid, signal.SIGKILL)
        elif end == "watchdog killed":
            for pid in named(run, "watchdog.watchdog_process"):
                os.kill(pid, signal.SIGKILL)
            os.kill(run.pid, signal.SIGINT)
        code = run.ended()
        expected = {"done": 0, "watchdog killed": 130}.get(end, -signal.SIGKILL)
        yield Outcome(True, code == expected, not run.left(), False)


def named(run: Launched, word: str) -> list[int]:
    """Return the processes of a run whose command line contains ``word``."""
    return [
        pid for pid in faults.marked(run.mark) if word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def sent(number: int, run: Launched) -> None:
    """Send the signal ``number`` to the run's driver."""
    os.kill(run.driver, number)


def hung_up(run: Launched) -> None:
    """Close the terminal of the run."""
    run.hang_up()


def stopped(run: Launched) -> None:
    """Suspend the run for twice the deadline of the active stage."""
    os.killpg(run.pid, signal.SIGSTOP)
    time.sleep(4)
    os.killpg(run.pid, signal.SIGCONT)


# name → (fault, settings of the run, expected exit code)
SIGNALS: dict[str, tuple[Callable[[Launched], None], dict[str, Any], int]] = {
    "hangup": (hung_up, {"fault": "sleep", "terminal": True}, 130),
    "hangup while a stage prints": (hung_up, {"fault": "speak", "terminal": True}, 130),
    "SIGHUP": (partial(sent, signal.SIGHUP), {"fault": "sleep"}, 130),
    "SIGSTOP": (stopped, {"fault": "sleep"}, 0),
}


def signals(place: Place) -> Iterator[Outcome]:
    """Close the run's terminal, send SIGHUP, or suspend the run.

    After a hangup, the run must save its state. The time for which the driver is suspended must not count
    towards a deadline.
    """
    wanted = straight(place)
    for kind in place.of(SIGNALS, 2):
        happen, what, expected = SIGNALS[kind]
        run = launch(place.folder, kind.replace(" ", "-"), **what)
        until(lambda path=place.folder / f"{run.name}.once": path.exists())
        happen(run)
        code = run.ended()
        if expected == 0:
            yield Outcome(True, True, code == 0, code == 0 and unlike(run, wanted))
        else:
            yield resumed_outcome(run, wanted, code == expected and run.status["state"] == "interrupted")


def until(holds: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until a condition is true. Raises TimeoutError after ``seconds``."""
    limit = time.monotonic() + seconds
    while not holds():
        time.sleep(0.02)
        if time.monotonic() > limit:
            raise TimeoutError("the condition was not met in time")


def driven_by(place: Place) -> Iterator[Outcome]:
    """On pools, kill the raylet, the GCS or the watchdog, or provide an empty token file.

    Without the raylet or the GCS, the run must save its state and end with a message. A killed watchdog must
    be replaced, and an empty token file must be rewritten.
    """
    wanted = straight(place, 20)
    for name in place.of(("raylet", "gcs_server", "watchdog.watchdog_process"), 2):
        # the run's own command line must not contain the name, or `named` would find it
        run = launch(place.folder, name.replace(".", "-"), *POOLS, *SLOW, iterations=20)
        run.reaches(4)
        for pid in named(run, name) if "." in name else commands(run, name):
            os.kill(pid, signal.SIGKILL)
        code = run.ended(240)
        if "." in name:
            yield Outcome(True, True, code == 0, code == 0 and unlike(run, wanted))
        else:
            yield resumed_outcome(
                run, wanted, code == 1 and f"Ray's {name}" in run.output() and run.status["state"] == "failed"
            )
    with token(place.folder / "token"):
        run = launch(place.folder, "token", *POOLS, iterations=20)
        code = run.ended(240)
        yield Outcome(
            True, bool((place.folder / "token").read_text()), code == 0, code == 0 and unlike(run, wanted)
        )


def commands(run: Launched, name: str) -> list[int]:
    """Return the processes of a run whose program is ``name``."""
    return [pid for pid in faults.marked(run.mark) if os.path.basename(process_tag.command(pid)) == name]


@contextmanager
def token(path: Path) -> Iterator[None]:
    """Inside the context, make ``path`` an empty file that Ray reads its token from."""
    path.touch()
    before = os.environ.get("RAY_AUTH_TOKEN_PATH")
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(path)
    try:
        yield
    finally:
        del os.environ["RAY_AUTH_TOKEN_PATH"]
        if before is not None:
            os.environ["RAY_AUTH_TOKEN_PATH"] = before


CLASSES: dict[str, Callable[[Place], Iterator[Outcome]]] = {
    "stage exits, crashes, holds the interpreter": stages,
    "stage exits, crashes, holds the interpreter, on pools": stages_on_pools,
    "stage or reward forks": forks,
    "processes of stages and rewards": started_ones,
    "SIGHUP, SIGSTOP": signals,
    "raylet, GCS, watchdog killed, empty token": driven_by,
}
