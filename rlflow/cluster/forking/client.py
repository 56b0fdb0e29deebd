"""The program that Ray starts in place of a worker: it has the fork server start the worker, and ends as the
worker ends.

``PYTHON -I -S client.py INTRODUCTION SCRIPT ARGUMENT…``: the introduction is a file with the server's
address, its key, and the modules that the script will import. Where no server answers, this process becomes
the worker itself, as Ray would have started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

# started without the packages of the environment, whose search takes longer than all the rest
if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))

from rlflow.cluster.forking import request as requests
from rlflow.processes.watchdog import kin


def main(introduction: str, command: list[str]) -> None:
    """Have the command run by the fork server that the introduction names, or else by this process."""
    connection = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, EOFError):
        connection = asked(introduction, command)
    if connection is None:
        os.execv(sys.executable, [sys.executable, *command])
    end_as(status_of(connection))


def asked(introduction: str, command: list[str]) -> socket.socket:
    """Ask for a process, and wait until there is one. Gives the connection to the server. Raises OSError,
    ValueError, LookupError, TypeError or EOFError where it is not to be had."""
    kin.die_with_raylet()  # the server ends a process that nobody waits for
    known = json.loads(Path(introduction).read_text())
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(known["address"])
    requests.send(
        connection,
        requests.Request(known["key"], known["modules"], command, dict(os.environ), os.getcwd()),
        [0, 1, 2],
    )
    requests.reply(connection)
    return connection


def status_of(connection: socket.socket) -> int:
    """How the process ended, as ``os.waitpid`` gives it. Where the server ended first, the process did not
    outlive it."""
    try:
        return requests.reply(connection)
    except (OSError, EOFError):
        return signal.SIGKILL


def end_as(status: int) -> None:
    """End this process with the exit code or the signal with which another ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
