"""What each process of a service is started from: its command, address and environment."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlflow.processes.addresses import LOOPBACK, Address
from rlflow.processes.declare import PORT, Service
from rlflow.services.gpus import VISIBLE

FRONT = "rlflow.services.serving.front"  # the module of the process that hands requests to replicas
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # variables by which libraries take their number of threads


@dataclass(frozen=True)
class Recipe:
    """The command, address and environment from which a process of a service is started."""

    service: str
    name: str  # of the process: the service's, and of one of several replicas its number, as search-2
    command: Sequence[str]
    url: str  # at which it is to listen
    health: str  # its path, or an empty text
    wait: float  # seconds until it must serve, and for which it may be silent and idle
    delay: float  # seconds for which it goes on after a run that has ended well
    variables: Mapping[str, str]  # of its environment, beside the run's own


def recipes(
    service: Service, place: Address, urls: Mapping[str, str], gpus: Sequence[Sequence[str]], variables: Mapping[str, str]
) -> Iterator[Recipe]:
    """The processes of a service, replicas before the front that hands requests to them. ``urls``: of all services, by name; ``gpus``: of
    each process; ``variables``: in which services find one another."""
    for number, port in enumerate(place.ports):
        name = f"{service.name}-{number + 1}" if place.front else service.name
        own = {VISIBLE: ",".join(gpus[number] if number < len(gpus) else ()), PORT: str(port)}
        threads = dict.fromkeys(THREADS, str(service.cpus)) if service.cpus else {}
        yield Recipe(service.name, name, service.command(port, urls), _url(port), service.health, service.wait, service.delay,
                     {**variables, **own, **threads})  # fmt: skip
    if place.front:
        command = [sys.executable, "-m", FRONT, str(place.front), *map(_url, place.ports)]
        yield Recipe(service.name, service.name, command, _url(place.front), service.health, service.wait, service.delay,
                     {VISIBLE: ""})  # fmt: skip


def _url(port: int) -> str:
    return f"http://{LOOPBACK}:{port}"
