"""What the process of a service is started from: its command, address and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.processes.addresses import Address
from rlflow.processes.declare import PORT, Service
from rlflow.services.gpus import VISIBLE

# variables by which libraries take their number of threads
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Recipe:
    """The command, address and environment from which the process of a service is started."""

    name: str  # of the service
    command: Sequence[str]
    url: str  # at which it is to listen
    health: str  # its path, or an empty text
    wait: float  # seconds until it must serve, and for which it may be silent and idle
    delay: float  # seconds for which it goes on after a run that has ended well
    variables: Mapping[str, str]  # of its environment, beside the run's own


def recipe(
    service: Service,
    place: Address,
    urls: Mapping[str, str],
    gpus: Sequence[str],
    variables: Mapping[str, str],
) -> Recipe:
    """The recipe of a service. ``urls``: of all services, by name; ``gpus``: of its process; ``variables``:
    in which services find one another."""
    own = {VISIBLE: ",".join(gpus), PORT: str(place.port)}
    threads = dict.fromkeys(THREADS, str(service.cpus)) if service.cpus else {}
    return Recipe(
        service.name,
        service.command(place.port, urls),
        place.url,
        service.health,
        service.wait,
        service.delay,
        {**variables, **own, **threads},
    )
