"""The fork server: a process that imports modules once, and then forks itself on request.

Usage: ``python -m rlflow.cluster.forking.fork_server LISTENER PARENT``. LISTENER is the file descriptor of a
listening socket. PARENT is the pid of a process, and the server ends when that process does. The server reads
its key from stdin. It has only one thread, because forking a process with several threads is unsafe. It kills
a fork when the client that requested it ends. All forks end with the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hmac
import importlib
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.cluster.forking import request as requests
from rlflow.cluster.forking.request import Request
from rlflow.processes.watchdog import process_tag

# a variable in the server's initial environment; a fork overwrites it with its process tag
ROOM, SLOT = "RLFLOW_FORKS", "/" * 512
ANSWER_SECONDS = 30.0  # time limit to receive the rest of a request
CREDENTIALS = struct.Struct("3i")  # pid, user and group of a peer


@dataclass
class Fork:
    """A process started by the server."""

    pid: int
    pidfd: int  # descriptor that is readable once the process has ended
    connection: socket.socket  # to the client that waits for the end of the process


@dataclass
class ForkServer:
    """Serves requests until the parent process ends.

    ``run`` never returns in the server. In a fork, it returns the request that the fork was made for.
    """

    listener: socket.socket
    parent: int  # descriptor that is readable once the parent has ended
    key: str
    environment: Mapping[str, str]  # environment with which this process imported its modules
    forks: list[Fork] = field(default_factory=list)

    def run(self) -> Request:
        """Serve requests until the parent process ends. Return the request, but only in its fork."""
        while True:
            ready = self._ready()
            if ready == self.parent:
                os._exit(0)
            if ready != self.listener.fileno():
                self._end(
                    next(fork for fork in self.forks if ready in (fork.pidfd, fork.connection.fileno()))
                )
            elif (request := self._accept()) is not None:
                return request

    def _ready(self) -> int:
        """Wait until a file descriptor is readable, and return it.

        It returns only one, because handling it can close others, whose numbers the system may then reuse.
        """
        with selectors.PollSelector() as selector:
            for file in (self.parent, self.listener.fileno()):
                selector.register(file, selectors.EVENT_READ)
            for fork in self.forks:
                selector.register(fork.pidfd, selectors.EVENT_READ)
                # a client sends nothing after its request, so a readable connection means that the client has
                # ended
                selector.register(fork.connection.fileno(), selectors.EVENT_READ)
            return int(selector.select()[0][0].fd)

    def _accept(self) -> Request | None:
        """Accept a connection and serve its request.

        In a fork, returns the request. In the server, returns None.
        """
        connection, _ = self.listener.accept()
        files: list[int] = []
        try:
            connection.settimeout(ANSWER_SECONDS)
            if peer_user(connection) != os.geteuid():
                raise ValueError("another user's process")
            request, files = requests.receive(connection)
            if not hmac.compare_digest(request.key, self.key):
                raise ValueError("another key")
            import_all(request.modules)
            if not request.command:
                connection.close()
            elif self._forked(request, connection, files):
                return request
        except (OSError, ValueError, EOFError):
            connection.close()
        finally:
            for file in files:
                os.close(file)
        return None

    def _forked(self, request: Request, connection: socket.socket, files: list[int]) -> bool:
        """Fork a process for a request. Return True in the fork and False in the server.

        Raises OSError, or ValueError if this server can't start the requested process.
        """
        mark = request.environment.get(process_tag.MARK, "").encode()
        if len(mark) > len(SLOT) or len(files) != requests.FILES or not os.path.isfile(request.command[0]):
            raise ValueError("not a process that this server can start")
        if other := [
            name
            for name, value in self.environment.items()
            if name != ROOM and request.environment.get(name) != value
        ]:
            raise ValueError(f"a process with another {other[0]} than this server had when it imported")
        server, pid = os.getpid(), os.fork()
        if pid == 0:
            try:
                self._inherit(server, connection, files)
            except BaseException:
                os._exit(1)  # a failed fork must not continue as a second server
            return True
        connection.settimeout(None)
        self.forks.append(Fork(pid, os.pidfd_open(pid), connection))
        with contextlib.suppress(OSError):  # the client has ended; the main loop handles that
            connection.sendall(requests.REPLY.pack(pid))
        return False

    def _inherit(self, server: int, connection: socket.socket, files: list[int]) -> None:
        """Set up a new fork: its files, its process group, and that it ends when the server does.

        The fork takes over the client's files and closes the server's. It leads its own process group,
        because Ray kills the whole process group of a dead worker.
        """
        process_tag.die_with(server)
        os.setpgid(0, 0)
        for number, file in enumerate(files):
            os.dup2(file, number)
        for other in (self.listener, connection, *(fork.connection for fork in self.forks)):
            other.close()
        for descriptor in (self.parent, *(fork.pidfd for fork in self.forks)):
            os.close(descriptor)

    def _end(self, fork: Fork) -> None:
        """Kill a fork that is still running, and send its exit status to its client."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
        status = os.waitpid(fork.pid, 0)[1]
        with contextlib.suppress(OSError):
            fork.connection.sendall(requests.REPLY.pack(status))
        fork.connection.close()
        os.close(fork.pidfd)
        self.forks.remove(fork)


def peer_user(connection: socket.socket) -> int:
    """Return the user id of the process at the other end of a Unix socket."""
    return int(
        CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    )


def import_all(modules: list[str]) -> None:
    """Import the named modules, skipping those that can't be imported.

    A fork that needs such a module will report the error itself.
    """
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
                gc.collect()
                gc.freeze()  # otherwise garbage collection in a fork would write to all shared pages


def become(request: Request) -> None:
    """Run a request's script in this process, as if Python had been started with the request's command."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    mark(request.environment.get(process_tag.MARK, ""))
    fresh_numbers()
    sys.argv = request.command
    runpy.run_path(request.command[0], run_name="__main__")


def mark(value: str) -> None:
    """Set the process tag of a run in the environment that ``/proc`` shows for this process.

    Otherwise, ``/proc`` would still show the server's environment.
    """
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first, end = int(fields[47]), int(fields[48])
    room = f"{ROOM}={SLOT}".encode()
    place = ctypes.string_at(first, end - first).find(room)
    if place >= 0:
        ctypes.memmove(
            first + place, f"{process_tag.MARK}={value}".encode().ljust(len(room), b"\0"), len(room)
        )


def fresh_numbers() -> None:
    """Reseed the random number generators, and set the number of threads from the environment.

    Some libraries choose a seed when they are imported, so all forks would otherwise share it.
    """
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))


def main() -> None:
    """Run a fork server with the socket and parent given on the command line."""
    listener, parent = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    key = sys.stdin.readline().strip()
    become(ForkServer(listener, parent, key, dict(os.environ)).run())


if __name__ == "__main__":
    main()
