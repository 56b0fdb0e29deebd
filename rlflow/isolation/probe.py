"""Which walls stand on this machine, found out by a process that puts them up and runs against them.

Run as ``python -m rlflow.isolation.probe``, it prints what was refused, as JSON.
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
WALLS = {  # each wall, and what has it
    "network": "seccomp", "programs": "seccomp", "signals": "seccomp", "files": "Landlock, from Linux 5.13", "processes": "Landlock",
    "limits": "resource limits",
}  # fmt: skip


@functools.cache
def missing() -> tuple[str, ...]:
    """The walls around scorers that do not stand here; none where they are isolated."""
    with tempfile.TemporaryDirectory(prefix="rlflow-probe-") as folder:
        command = [sys.executable, "-P", "-m", "rlflow.isolation.probe", folder]
        try:
            done = subprocess.run(command, capture_output=True, env=limits.environment(folder), timeout=SECONDS, stdin=subprocess.DEVNULL)
            refused = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return tuple(WALLS)
    return tuple(name for name in WALLS if name not in refused)


def lines() -> list[str]:
    """What holds here, in words."""
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
    folder = sys.argv[1]
    own = os.path.join(folder, "own")
    os.mkdir(own)
    walls.around_scorers(own)
    attempts: dict[str, Callable[[], object]] = {
        "network": lambda: socket.socket().close(),
        "programs": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "signals": lambda: os.kill(os.getppid(), 0),
        "files": lambda: os.mkdir(os.path.join(folder, "made")),
        "processes": Path(f"/proc/{os.getppid()}/environ").read_bytes,
    }
    found = [name for name, attempt in attempts.items() if _refused(attempt)]
    with contextlib.suppress(ValueError):
        found += ["limits"] if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 else []
    print(json.dumps(found))


if __name__ == "__main__":
    main()
