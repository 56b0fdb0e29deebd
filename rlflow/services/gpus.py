"""Divide this machine's GPUs: each service gets its own, and the run gets the rest."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from rlflow.errors import PlanError
from rlflow.processes.declare import Service

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible(count: int) -> list[str]:
    """Return the names of the GPUs that this process may use.

    These are the ones in CUDA_VISIBLE_DEVICES or, if it isn't set, all ``count`` GPUs of the machine.
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
    """Assign GPUs to services. Return the GPUs of each service by name, and the GPUs left for the run.

    ``there``: all available GPUs. A run uses the first GPUs, so services get theirs from the end of the list.
    Raises PlanError if there are too few.
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
