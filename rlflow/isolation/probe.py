"""Finds out which walls work on this machine: a process puts them up and tries to get through each.

Run as ``python -m rlflow.isolation.probe FOLDER``, it prints what was refused, as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from rlflow.isolation import limits, walls

SECONDS = 60.0
WALLS = {  # wall → the feature of the kernel that it needs
    "network": "seccomp", "programs": "seccomp", "signals": "seccomp", "files": "Landlock, from Linux 5.13", "processes": "Landlock",
    "limits": "resource limits",
}  # fmt: skip


@functools.cache
def missing() -> tuple[str, ...]:
    """The walls around scorers that do not work on this machine; empty where scorers are isolated."""
    with tempfile.TemporaryDirectory(prefix="rlflow-probe-") as folder:
        command = [sys.executable, "-P", "-m", "rlflow.isolation.probe", folder]
        try:
            process = subprocess.run(command, capture_output=True, env=limits.environment(folder), timeout=SECONDS,
                                     stdin=subprocess.DEVNULL)  # fmt: skip
            refused = json.loads(process.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return tuple(WALLS)
    return tuple(name for name in WALLS if name not in refused)


def lines() -> list[str]:
    """A line for each wall: whether it works on this machine."""
    lacks = missing()
    stand = [f"{name}: {'walled off' if name not in lacks else f'open: this machine has no {WALLS[name]}'}" for name in WALLS]
    return [*stand, "tasks whose scorers evaluate text " + ("need --unsafe-scorers" if lacks else "can be used")]


def _refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return True
    return False


def main() -> None:
    """Put up the walls of scorers, try what each refuses, and print the names of those that refused."""
    folder = sys.argv[1]
    writable = os.path.join(folder, "own")
    os.mkdir(writable)
    walls.around_scorers(writable)
    attempts: dict[str, Callable[[], object]] = {
        "network": lambda: socket.socket().close(),
        "programs": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "signals": lambda: os.kill(os.getppid(), 0),
        "files": lambda: os.mkdir(os.path.join(folder, "made")),
        "processes": Path(f"/proc/{os.getppid()}/environ").read_bytes,
    }
    refused = [name for name, attempt in attempts.items() if _refused(attempt)]
    with contextlib.suppress(ValueError):
        refused += ["limits"] if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else []
    print(json.dumps(refused))


if __name__ == "__main__":
    main()
