"""A run's services: their GPUs, the folder for their output, and their URLs in the flow's settings."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rlflow.checkpoints import durable
from rlflow.compiler.trace.compile import Program
from rlflow.config.options import Options
from rlflow.errors import PlanError
from rlflow.processes.addresses import Address
from rlflow.processes.declare import Service, in_place
from rlflow.processes.watchdog.beside import Watchdog
from rlflow.services.gpus import VISIBLE, share, visible
from rlflow.services.running import Gpus, Services


def reserved_gpus(declared: Sequence[Service], options: Options) -> Gpus:
    """Return the GPUs of the run's services, and hide them from the run itself.

    Call this before the run initialises a GPU. Raises PlanError like ``gpu_shares``.
    """
    shares, left = gpu_shares(declared, options)
    if shares:
        os.environ[VISIBLE] = ",".join(left)
    return shares


def gpu_shares(declared: Sequence[Service], options: Options) -> tuple[Gpus, Sequence[str]]:
    """Return which GPUs each of the run's services gets, and which are left for the run.

    Both are empty if no service needs a GPU. Raises PlanError if there are too few GPUs, or if the run joins
    an existing Ray cluster, where Ray assigns GPUs itself.
    """
    wanting = [each.name for each in declared if each.gpus]
    if not wanting:
        return {}, ()
    if options.ray_address is not None:
        raise PlanError.of(
            "service-gpus",
            f"service '{wanting[0]}' needs a GPU of this machine, but the joined Ray assigns the GPUs",
            found=f"--service.{wanting[0]}.gpus together with --ray-address",
            expected="GPUs assigned either by Ray or by --service.NAME.gpus, not both",
            remedy=f"start the service elsewhere, and give its URL: --service.{wanting[0]} http://HOST:PORT",
        )
    shares, left = share(declared, visible(torch.cuda.device_count()))
    if not left and options.device == "cuda":
        raise PlanError.of(
            "too-few-gpus",
            "services take all GPUs, and none is left for the run",
            expected="a GPU for the run",
            found=f"{len(shares)} services",
            remedy="give services fewer GPUs, or use --device cpu",
        )
    return shares, left


def services_of(
    declared: tuple[Service, ...],
    places: Mapping[str, Address],
    gpus: Gpus,
    folder: Path | None,
    joined: bool,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> Services:
    """Return a run's services, which haven't been started yet.

    ``joined``: whether the run joins an existing Ray cluster. ``folder``: a path on the filesystem of the
    run's folder. Services write their output next to this path until the run's folder exists. If ``folder``
    is None, they write to a temporary folder that is removed at the end.
    """
    if joined and any(not each.external for each in declared):
        note(
            "services of this run listen on this machine's loopback address: workers on other machines "
            "cannot reach them; give a URL instead"
        )
    aside = (
        durable.aside(folder / "services")
        if folder is not None
        else Path(tempfile.gettempdir()) / f"rlflow-{watchdog.name}-services"
    )
    if declared:
        watchdog.remove_in_the_end(aside)
    return Services(declared, places, gpus, aside, watchdog.name, note)


def with_urls(program: Program, urls: Mapping[str, str]) -> Program:
    """Return the program with each ``{NAME}`` in its stages' and losses' settings replaced with a service's
    URL.

    ``urls``: the URL of each service, by name. The graph keeps the names, so it doesn't change with the
    ports.
    """
    settings = {
        node: {name: in_place(value, urls) for name, value in values.items()}
        for node, values in program.settings.items()
    }
    return dataclasses.replace(program, settings=settings) if urls else program


def settings_with_urls(hp: Any, urls: Mapping[str, str]) -> Any:
    """Return a flow's settings with each ``{NAME}`` replaced with a service's URL, for calls without a graph."""
    changed = (
        {name: in_place(value, urls) for name, value in vars(hp).items()} if urls and hp is not None else {}
    )
    return (
        dataclasses.replace(
            hp, **{name: value for name, value in changed.items() if value != getattr(hp, name)}
        )
        if changed
        else hp
    )
