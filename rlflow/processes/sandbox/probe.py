"""Probe the sandbox: start a process that enters it and tries to break each restriction.

Run it as ``python -m rlflow.processes.sandbox.probe FOLDER KIND``. It prints the names of the restrictions
that held, as JSON. KIND is "scorers", or "code" for code from models or third parties.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from rlflow.processes.sandbox import kernel, limits, sandboxes

SECONDS, MEGABYTES = 60.0, 512
SANDBOX = {  # restriction → the kernel feature that it needs
    "network": "seccomp",
    "programs": "seccomp",
    "signals": "seccomp",
    "files": "Landlock, from Linux 5.13",
    "processes": "Landlock",
    "limits": "resource limits",
}


OF_CODE = {  # further restrictions for code
    "reading": "Landlock, from Linux 5.13",
    "outliving the server": "seccomp",
    "shared memory": "seccomp",
}
Kind = Literal["scorers", "code"]


def around(kind: Kind) -> dict[str, str]:
    """Return the restrictions in this kind of sandbox, each with the kernel feature it needs."""
    return SANDBOX | OF_CODE if kind == "code" else SANDBOX


@functools.cache
def missing(kind: Kind = "scorers") -> tuple[str, ...]:
    """Return the names of the restrictions that don't work on this machine.

    Empty if this kind of sandbox works completely.
    """
    with tempfile.TemporaryDirectory(prefix="rlflow-probe-") as folder:
        command = [sys.executable, "-P", "-m", "rlflow.processes.sandbox.probe", folder, kind]
        try:
            process = subprocess.run(
                command,
                capture_output=True,
                env=limits.environment(folder),
                timeout=SECONDS,
                stdin=subprocess.DEVNULL,
            )
            refused = json.loads(process.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return tuple(around(kind))
    return tuple(name for name in around(kind) if name not in refused)


def lines() -> list[str]:
    """Return a line for each restriction, saying whether it works on this machine."""
    lacks = (*missing(), *(name for name in missing("code") if name in OF_CODE))
    stand = [
        f"{name}: {f'not isolated: this machine lacks {needs}' if name in lacks else 'isolated'}"
        for name, needs in around("code").items()
    ]
    return [
        *stand,
        "tasks whose scorers evaluate text " + ("need --unsafe-scorers" if missing() else "can be used"),
        "rlflow serve code and --env python " + ("need --unsafe" if missing("code") else "can be used"),
    ]


def _refused(action: Callable[[], object]) -> bool:
    try:
        action()
    except OSError:
        return True
    return False


def main() -> None:
    """Enter the sandbox, try to break each restriction, and print the names of those that held."""
    folder, kind = sys.argv[1], sys.argv[2]
    writable = os.path.join(folder, "own")
    os.mkdir(writable)
    Path(folder, "secret").touch()
    if kind == "code":
        sandboxes.around_code(writable, MEGABYTES, SECONDS)
    else:
        sandboxes.around_scorers(writable)
    attempts: dict[str, Callable[[], object]] = {
        "network": lambda: socket.socket().close(),
        "programs": lambda: os.posix_spawn("/bin/true", ["true"], {}),
        "signals": lambda: os.kill(os.getppid(), 0),
        "files": lambda: os.mkdir(os.path.join(folder, "made")),
        "processes": Path(f"/proc/{os.getppid()}/environ").read_bytes,
        "reading": Path(folder, "secret").read_bytes,
        "outliving the server": kernel.outlive,
        "shared memory": lambda: mmap.mmap(-1, mmap.PAGESIZE).close(),
        "limits": lambda: [os.dup(1) for _ in range(sandboxes.OPEN)],
    }
    print(
        json.dumps(
            [
                name
                for name in attempts
                if name in around("code" if kind == "code" else "scorers") and _refused(attempts[name])
            ]
        )
    )


if __name__ == "__main__":
    main()
