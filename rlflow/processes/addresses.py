"""Addresses of services. Each service that the run starts gets a free port on the loopback address."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import PlanError
from rlflow.processes.declare import Service

LOOPBACK = "127.0.0.1"
LOWEST = 10_000  # lower ports belong to well-known programs
RANGE = Path(
    "/proc/sys/net/ipv4/ip_local_port_range"
)  # ports that the kernel assigns to outgoing connections
TRIES = 1000


@dataclass(frozen=True)
class Address:
    """The address of a service."""

    url: str  # the URL for requests
    port: int = 0  # port of the service's process; 0 for a service that others run


def addresses(services: Iterable[Service]) -> dict[str, Address]:
    """Return the address of each service, by name. Services that the run starts get a free port.

    The ports are free now, but nothing reserves them. Raises PlanError if no port is free.
    """
    used: set[int] = set()
    return {each.name: _address(each, used) for each in services}


def _address(service: Service, used: set[int]) -> Address:
    if service.external:
        return Address(service.run.rstrip("/"))
    port = _free(used)
    return Address(f"http://{LOOPBACK}:{port}", port)


def _free(used: set[int]) -> int:
    """Return a free port that isn't in ``used``, and add it to ``used``.

    The port is below the range that the system uses for outgoing connections, so it stays free while a
    service restarts.
    """
    for _ in range(TRIES):
        port = random.randrange(LOWEST, _highest())
        if port not in used and _binds(port):
            used.add(port)
            return port
    raise PlanError.of(
        "service-port",
        "cannot find a free port for a service",
        found=f"{TRIES} ports that are used",
        expected=f"a free port of {LOOPBACK}",
        remedy="end the programs that use them, or give the URL of a running service",
    )


def _highest() -> int:
    try:
        return max(int(RANGE.read_text().split()[0]), LOWEST + 1000)
    except (OSError, ValueError, IndexError):
        return 32_768


def _binds(port: int) -> bool:
    with socket.socket() as listening:
        # Set this option as servers do, since the port may belong to an earlier server that has just ended.
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
