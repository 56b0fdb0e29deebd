"""How to start a service's process: its command, address and environment variables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.processes.addresses import Address
from rlflow.processes.declare import PORT, Service
from rlflow.services.gpus import VISIBLE

# variables that set the number of threads in libraries
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Recipe:
    """Everything needed to start a service's process."""

    name: str  # name of the service
    command: Sequence[str]
    url: str  # where the process must listen
    health: str  # the health path of the service, or ""
    # how many seconds the process may take to start serving, and later, be silent and idle
    wait: float
    delay: float  # how many seconds the process keeps running after a successful run
    variables: Mapping[str, str]  # environment variables to add to the run's


def recipe(
    service: Service,
    place: Address,
    urls: Mapping[str, str],
    gpus: Sequence[str],
    variables: Mapping[str, str],
) -> Recipe:
    """Return the recipe for a service's process.

    ``urls``: the URL of every service, by name. ``gpus``: the GPUs the process may use. ``variables``:
    environment variables with the URLs of all services.
    """
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
