"""Where services listen: a free port of this machine's loopback for each that the run starts."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import PlanError
from rlflow.processes.declare import Service

LOOPBACK = "127.0.0.1"
LOWEST = 10_000  # ports below are those of well-known programs
RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")  # ports that the kernel gives to outgoing connections
TRIES = 1000


@dataclass(frozen=True)
class Address:
    """The address of a service."""

    url: str  # that others ask
    port: int = 0  # at which its process listens; 0 for a service that others run


def addresses(services: Iterable[Service]) -> dict[str, Address]:
    """The address of each service, by name. Ports that are free now are chosen; nothing keeps them. Raises
    PlanError where none is."""
    used: set[int] = set()
    return {each.name: _address(each, used) for each in services}


def _address(service: Service, used: set[int]) -> Address:
    if service.external:
        return Address(service.run.rstrip("/"))
    port = _free(used)
    return Address(f"http://{LOOPBACK}:{port}", port)


def _free(used: set[int]) -> int:
    """A port that nothing listens at and that is not in ``used``, to which it is added. It is below those of
    outgoing connections, so that a service which is started anew finds it free."""
    for _ in range(TRIES):
        port = random.randrange(LOWEST, _highest())
        if port not in used and _binds(port):
            used.add(port)
            return port
    raise PlanError.of(
        "service-port",
        "no port is free for a service",
        found=f"{TRIES} that are used",
        expected=f"a free port of {LOOPBACK}",
        remedy="end what listens there, or name a service that runs by its URL",
    )


def _highest() -> int:
    try:
        return max(int(RANGE.read_text().split()[0]), LOWEST + 1000)
    except (OSError, ValueError, IndexError):
        return 32_768


def _binds(port: int) -> bool:
    with socket.socket() as listening:
        # as servers do, where an earlier one has just ended
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listening.bind((LOOPBACK, port))
        except OSError:
            return False
        return True
