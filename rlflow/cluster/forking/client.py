"""The program that Ray starts in place of a worker. It asks the fork server to start the real one.

Usage: ``PYTHON -I -S client.py INTRODUCTION SCRIPT ARGUMENT…``. INTRODUCTION is a file that contains the
server's address and key, and the modules that the script will import. The program waits for the worker and
exits with its status. If no server answers, it runs the script itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path

# this program is started without the packages of the environment, because finding them takes longer than
# everything else
if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[3]))

from rlflow.cluster.forking import request as requests
from rlflow.processes.watchdog import process_tag


def main(introduction: str, command: list[str]) -> None:
    """Run a command in a fork of the server, or in this process if that fails."""
    connection = None
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, EOFError):
        connection = asked(introduction, command)
    if connection is None:
        os.execv(sys.executable, [sys.executable, *command])
    end_as(status_of(connection))


def asked(introduction: str, command: list[str]) -> socket.socket:
    """Ask the fork server to start ``command``. Return the connection once the new process is running.

    Raises OSError, ValueError, LookupError, TypeError or EOFError if the server can't start it.
    """
    process_tag.die_with_raylet()  # if this process dies, the server ends the worker
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
    """Wait for the fork to end, and return its ``os.waitpid`` status.

    If the server ends first, it takes the fork with it, and the status is that of a killed process.
    """
    try:
        return requests.reply(connection)
    except (OSError, EOFError):
        return signal.SIGKILL


def end_as(status: int) -> None:
    """End this process with the exit code or signal given by an ``os.waitpid`` status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(abs(code))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
