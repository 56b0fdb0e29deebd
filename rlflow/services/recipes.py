"""The recipe of a service's process: its command, address and environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlflow.processes.addresses import Address
from rlflow.processes.declare import PORT, Service
from rlflow.services.gpus import VISIBLE

# variables from which libraries read their number of threads
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True)
class Recipe:
    """The command, address and environment from which the process of a service is started."""

    name: str  # of the service
    command: Sequence[str]
    url: str  # at which it must listen
    health: str  # its health path, or an empty text
    wait: float  # most seconds until it serves, and most seconds of silence without work
    delay: float  # seconds for which it keeps running after a successful run
    variables: Mapping[str, str]  # of its environment, in addition to the run's


def recipe(
    service: Service,
    place: Address,
    urls: Mapping[str, str],
    gpus: Sequence[str],
    variables: Mapping[str, str],
) -> Recipe:
    """The recipe of a service. ``urls``: of all services, by name; ``gpus``: of its process; ``variables``:
    the URLs of all services as environment variables."""
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
