"""The services of a run: made from its configuration, with GPUs, a folder for what they print, and their URLs
where settings of the flow name them."""

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
    """The GPUs of a run's services. The others are left for the run, which must not have looked at any
    before. Raises PlanError where there are not enough, or a Ray that is joined gives them out itself."""
    wanting = [each.name for each in declared if each.gpus]
    if not wanting:
        return {}
    if options.ray_address is not None:
        raise PlanError.of(
            "service-gpus",
            f"service '{wanting[0]}' wants a GPU of this machine, which the Ray that is joined gives out",
            found=f"--service.{wanting[0]}.gpus beside --ray-address",
            expected="one that decides on a GPU",
            remedy=f"start it elsewhere, and name its URL: --service.{wanting[0]} http://HOST:PORT",
        )
    shares, left = share(declared, visible(torch.cuda.device_count()))
    if not left and options.device == "cuda":
        raise PlanError.of(
            "service-gpus",
            "services take all GPUs, and none is left for the run",
            expected="a GPU for the run",
            found=f"{len(shares)} services",
            remedy="fewer GPUs for services, or --device cpu",
        )
    os.environ[VISIBLE] = ",".join(left)
    return shares


def services_of(
    declared: tuple[Service, ...],
    places: Mapping[str, Address],
    gpus: Gpus,
    folder: Path | None,
    joined: bool,
    watchdog: Watchdog,
    note: Callable[[str], None],
) -> Services:
    """The services of a run, not started yet. ``joined``: whether it joins a Ray that runs. ``folder``: on
    the file system of the run's own, where what they print goes until that is there; None for a folder that
    is removed in the end."""
    if joined and any(not each.external for each in declared):
        note(
            "services of this run listen on this machine's loopback: workers on other machines cannot "
            "reach them; name a URL instead"
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
    """The program, whose stages and losses are called with the URL of a service (``urls``: by name) in place
    of ``{NAME}``. Its graph keeps the names, since it is the same each time that the run goes on, at
    whichever ports its services listen."""
    settings = {
        node: {name: in_place(value, urls) for name, value in values.items()}
        for node, values in program.settings.items()
    }
    return dataclasses.replace(program, settings=settings) if urls else program


def settings_with_urls(hp: Any, urls: Mapping[str, str]) -> Any:
    """A flow's settings for calls without a graph, with URLs in the same way."""
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
