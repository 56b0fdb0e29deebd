"""The fork servers of this process.

The first run that needs a server starts it. Later runs use it too, and it ends with this process.
"""

from __future__ import annotations

import atexit
import json
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlflow.cluster.forking import client
from rlflow.cluster.forking.fork_server import ROOM, SLOT
from rlflow.cluster.forking.request import Request, send
from rlflow.processes.children import Child
from rlflow.processes.watchdog import process_tag

SERVER = "rlflow.cluster.forking.fork_server"
BACKLOG = 256  # clients that may wait while the server imports
# variables that no import reads
APART = {process_tag.MARK, "PYTHONBREAKPOINT", "PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST"}
KEPT = 2  # maximum servers at a time; each number of threads per worker needs its own


@dataclass(frozen=True)
class Server:
    """A fork server started by this process."""

    process: Child
    address: str  # address of an abstract socket, which leaves no file
    key: str
    environment: Mapping[str, str]  # variables that can affect the server's imports

    @classmethod
    def start(cls, environment: Mapping[str, str]) -> Server:
        """Start a server with this environment and return it. Raises OSError."""
        address, key = f"\0rlflow-forks-{secrets.token_hex(16)}", secrets.token_hex(32)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(BACKLOG)
            process = Child(
                [sys.executable, "-P", "-m", SERVER, str(listener.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                env={**environment, ROOM: SLOT},
            )
        assert process.stdin is not None
        with process.stdin, suppress(BrokenPipeError):
            process.stdin.write(f"{key}\n".encode())
        return cls(process, address, key, environment)

    def import_all(self, modules: list[str]) -> None:
        """Ask the server to import modules, without waiting for it. Raises OSError."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.address)
            send(connection, Request(self.key, modules), [])

    def end(self) -> None:
        """End the server and all its forks."""
        self.process.end()


_servers: list[Server] = []  # servers of this process; the latest used is last


def executable(folder: Path, modules: Iterable[str], threads: int) -> str | None:
    """Return the command with which Ray starts workers, or None if no fork server can be used.

    ``folder``: a private folder for the file with the server's address and key. ``modules``: the modules that
    the workers import. ``threads``: the number of threads of each worker. Fork servers need Linux.
    """
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return None
    names, introduction = sorted(modules), folder / "forks.json"
    try:
        server = _serving({**os.environ, "OMP_NUM_THREADS": str(threads)})
        server.import_all(names)
        content = json.dumps({"address": server.address, "key": server.key, "modules": names})
        with os.fdopen(os.open(introduction, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(content)
    except OSError:
        return None
    return shlex.join([sys.executable, "-I", "-S", client.__file__, str(introduction)])


def _serving(variables: Mapping[str, str]) -> Server:
    """Return a running server with this environment, starting one if there is none.

    Each environment needs its own server, because a fork can't change settings that a library read from the
    environment on import. Raises OSError if no server can be started.
    """
    environment = {
        name: value for name, value in variables.items() if name not in APART and not name.startswith("RAY_")
    }
    server = next(
        (each for each in _servers if each.environment == environment and each.process.poll() is None), None
    )
    if server is not None:
        _servers.remove(server)
    else:
        server = Server.start(environment)
    for other in [each for each in _servers if each.process.poll() is not None] or _servers[: -(KEPT - 1)]:
        _servers.remove(other)
        other.end()
    _servers.append(server)
    return server


def end() -> None:
    """End all fork servers of this process. Runs must have ended before."""
    while _servers:
        _servers.pop().end()


atexit.register(end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_servers.clear)  # the servers belong to the parent
