"""The fork server: a process that imports modules once and forks itself for each process that is asked for.

``python -m rlflow.cluster.forking.fork_server LISTENER PARENT``: the descriptor of a socket that listens, and
the pid of the process with which the server ends; its key comes on stdin. It has one thread, as a process
that forks must have. A fork is killed when the process that asked for it goes away, and when the server ends.
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
from rlflow.processes.watchdog import kin

# a variable with which the server starts, in whose place a fork's mark is written
ROOM, SLOT = "RLFLOW_FORKS", "/" * 512
ANSWER_SECONDS = 30.0  # how long the rest of a request may take
CREDENTIALS = struct.Struct("3i")  # pid, user and group of a peer


@dataclass
class Fork:
    """A process that the server has started."""

    pid: int
    pidfd: int  # a descriptor that is readable once the process has ended
    connection: socket.socket  # to the client that waits for its end


@dataclass
class ForkServer:
    """Takes requests until the parent ends. ``run`` gives a request in the process that was forked for it."""

    listener: socket.socket
    parent: int  # a descriptor that is readable once the parent has ended
    key: str
    environment: Mapping[str, str]  # with which this process has imported
    forks: list[Fork] = field(default_factory=list)

    def run(self) -> Request:
        """Serve; return in each fork alone."""
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
        """A descriptor of which something is to be read. Only one, since its number may be another's once
        that has been seen to."""
        with selectors.PollSelector() as selector:
            for file in (self.parent, self.listener.fileno()):
                selector.register(file, selectors.EVENT_READ)
            for fork in self.forks:
                selector.register(fork.pidfd, selectors.EVENT_READ)
                # a client sends nothing more: it has gone
                selector.register(fork.connection.fileno(), selectors.EVENT_READ)
            return int(selector.select()[0][0].fd)

    def _accept(self) -> Request | None:
        """Take a connection and do what it asks for. Gives the request in a process that was forked for
        it."""
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
        """Start a process. Gives whether this is that process. Raises ValueError for one that cannot be a
        fork, OSError."""
        mark = request.environment.get(kin.MARK, "").encode()
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
                os._exit(1)  # a second server would serve
            return True
        connection.settimeout(None)
        self.forks.append(Fork(pid, os.pidfd_open(pid), connection))
        with contextlib.suppress(OSError):  # the client has gone: that is seen like any later
            connection.sendall(requests.REPLY.pack(pid))
        return False

    def _inherit(self, server: int, connection: socket.socket, files: list[int]) -> None:
        """In a fork: end with the server, lead a process group, since Ray ends that of a worker that has
        died, and have the client's files and none of the server's."""
        kin.die_with(server)
        os.setpgid(0, 0)
        for number, file in enumerate(files):
            os.dup2(file, number)
        for other in (self.listener, connection, *(fork.connection for fork in self.forks)):
            other.close()
        for descriptor in (self.parent, *(fork.pidfd for fork in self.forks)):
            os.close(descriptor)

    def _end(self, fork: Fork) -> None:
        """See to a fork that has ended, or whose client has."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fork.pidfd, signal.SIGKILL)
        status = os.waitpid(fork.pid, 0)[1]
        with contextlib.suppress(OSError):
            fork.connection.sendall(requests.REPLY.pack(status))
        fork.connection.close()
        os.close(fork.pidfd)
        self.forks.remove(fork)


def peer_user(connection: socket.socket) -> int:
    """The user of the process at the other end."""
    return int(
        CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))[1]
    )


def import_all(modules: list[str]) -> None:
    """Import modules, those that are there and work: a fork says what is wrong with another, when it needs
    it."""
    for name in modules:
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
                gc.collect()
                gc.freeze()  # a collection in a fork would write to all pages that it shares


def become(request: Request) -> None:
    """Run the script of a request in this process, as if it had been started for it."""
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environment)
    mark(request.environment.get(kin.MARK, ""))
    fresh_numbers()
    sys.argv = request.command
    runpy.run_path(request.command[0], run_name="__main__")


def mark(value: str) -> None:
    """Write the mark of a run where the kernel shows the environment of this process, since the kernel goes
    on showing the server's."""
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    first, end = int(fields[47]), int(fields[48])
    room = f"{ROOM}={SLOT}".encode()
    place = ctypes.string_at(first, end - first).find(room)
    if place >= 0:
        ctypes.memmove(first + place, f"{kin.MARK}={value}".encode().ljust(len(room), b"\0"), len(room))


def fresh_numbers() -> None:
    """Draw new seeds, where libraries draw theirs as they are imported, and take the number of threads from
    the environment."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()
        if threads := os.environ.get("OMP_NUM_THREADS"):
            torch.set_num_threads(int(threads))


def main() -> None:
    """Serve, with the socket and the parent that the command line names."""
    listener, parent = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    key = sys.stdin.readline().strip()
    become(ForkServer(listener, parent, key, dict(os.environ)).run())


if __name__ == "__main__":
    main()
