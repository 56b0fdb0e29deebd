"""Division of this machine's GPUs: each service gets its own GPUs, and the run gets the remaining ones."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rlflow.errors import PlanError
from rlflow.processes.declare import Service

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(count: int) -> list[str]:
    """Return the names of the GPUs that this process may use.

    These are the GPUs in CUDA_VISIBLE_DEVICES. Without this variable, they are all ``count`` GPUs of the
    machine.
    """
    named = os.environ.get(VISIBLE)
    return (
        [name.strip() for name in named.split(",") if name.strip()]
        if named is not None
        else [str(number) for number in range(count)]
    )


def share(
    services: Iterable[Service], there: Sequence[str]
) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...]]:
    """Return service name → GPUs of the service, and the remaining GPUs for the run.

    ``there``: all GPUs that can be used. Services get GPUs from the end of this list, because a run uses the
    first ones. Raises PlanError if there are too few GPUs.
    """
    left, shares = tuple(there), dict[str, tuple[str, ...]]()
    for each in services:
        if each.gpus > len(left):
            raise _too_few(each, there, left)
        rest = len(left) - each.gpus
        left, shares[each.name] = left[:rest], left[rest:]
    return shares, left


def _too_few(service: Service, there: Sequence[str], left: Sequence[str]) -> PlanError:
    return PlanError.of(
        "too-few-gpus",
        f"service '{service.name}' needs {service.gpus} GPU{'s' * (service.gpus > 1)}",
        found=f"{len(there)} on this machine, and {len(left)} {'is' if len(left) == 1 else 'are'} "
        "not used by other services",
        expected="enough GPUs for all services together",
        remedy=f"--service.{service.name}.gpus 0",
    )
