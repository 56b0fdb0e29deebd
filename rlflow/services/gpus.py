"""GPUs of this machine, shared out between a run and its services: each process of a service has its own, and the run the others."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rlflow.errors import PlanError
from rlflow.processes.declare import Service

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(count: int) -> list[str]:
    """The names of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all ``count`` of the machine."""
    named = os.environ.get(VISIBLE)
    return [name.strip() for name in named.split(",") if name.strip()] if named is not None else [str(number) for number in range(count)]


def share(services: Iterable[Service], there: Sequence[str]) -> tuple[dict[str, list[tuple[str, ...]]], tuple[str, ...]]:
    """(service → the GPUs of each of its processes, the GPUs that are left for the run). Services take from the end of ``there``, since a
    run begins with the first. Raises PlanError where there are not enough."""
    left, shares = list(there), dict[str, list[tuple[str, ...]]]()
    for each in services:
        shares[each.name] = []
        for _ in range(0 if each.external else each.replicas):
            if each.gpus > len(left):
                raise _too_few(each, there, left)
            own = left[len(left) - each.gpus :]
            del left[len(left) - each.gpus :]
            shares[each.name].append(tuple(own))
    return shares, tuple(left)


def _too_few(service: Service, there: Sequence[str], left: Sequence[str]) -> PlanError:
    each = f" for each of {service.replicas} processes" if service.replicas > 1 else ""
    return PlanError.of("service-gpus", f"service '{service.name}' wants {service.gpus} GPU{'s' * (service.gpus > 1)}{each}",
                        found=f"{len(there)} on this machine, of which {len(left)} {'is' if len(left) == 1 else 'are'} left for it",
                        expected="as many as its processes take together", remedy=f"--service.{service.name}.gpus 0, or fewer replicas")
