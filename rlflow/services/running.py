"""A run's services, from start to end."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from rlflow.errors import PlanError, Problem
from rlflow.monitoring import served
from rlflow.monitoring.secrets import masked
from rlflow.monitoring.served import ServedProcess
from rlflow.processes.addresses import Address
from rlflow.processes.clients.outages import VARIABLE, Outages
from rlflow.processes.deadline import LOOK
from rlflow.processes.declare import HEAD, PORT, Service
from rlflow.services.member import PAUSES, PROBE, Member, Note
from rlflow.services.probe import unhealthy
from rlflow.services.recipes import recipe
from rlflow.services.service_process import GRACE, last_lines

Gpus = Mapping[str, Sequence[str]]  # service → its GPUs


class Services:
    """Starts a run's services, waits until they are serving, keeps them running, and ends them.

    For services that aren't started by the run, it only waits.
    """

    def __init__(
        self,
        services: Sequence[Service],
        places: Mapping[str, Address],
        gpus: Gpus,
        logs: Path,
        run: str,
        note: Note = lambda text: None,
    ) -> None:
        """Prepare a run's services without starting them.

        ``places`` and ``gpus``: the address and the GPUs of each service, by name. ``logs``: a folder for the
        services' output. ``start`` creates it, ``settle`` moves its content to the run's folder, and
        ``close`` removes it. ``run``: the run's name, for the process tag. ``note``: called with messages for
        the user.
        """
        self.services, self._places, self._logs, self._note = tuple(services), places, logs, note
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._folder: Path | None = None  # the run's folder, once it exists
        urls = {name: place.url for name, place in places.items()}
        self._variables = {each.variable: urls[each.name] for each in services}
        self._outages = Outages(logs / "outages")
        self._variables |= (
            {VARIABLE: str(self._outages.file.absolute())}
            if any(not each.external for each in services)
            else {}
        )
        self._before = {name: os.environ.get(name) for name in self._variables}
        self.members = [
            Member(
                recipe(each, places[each.name], urls, gpus.get(each.name, ()), self._variables),
                logs / f"{each.name}.log",
                run,
                note,
                self._changed,
            )
            for each in services
            if not each.external
        ]

    @property
    def away(self) -> float:
        """The longest time for which services can be unavailable, in seconds: the total time of all restarts."""
        return sum(pause + member.recipe.wait for member in self.members for pause in PAUSES)

    def start(self) -> None:
        """Start all services' processes, and set the environment variables with their URLs.

        If a command can't be started, this ends all processes and raises PlanError.
        """
        os.environ.update(self._variables)
        try:
            if self.members:
                self._logs.mkdir(parents=True)
            for member in self.members:
                _start(member)
        except BaseException:
            self.close()
            raise

    def ready(self) -> None:
        """Wait until all services are serving, then start supervising them.

        Raises a single PlanError that lists all services that aren't serving within their ``wait``.
        """
        PlanError.refuse([*filter(None, map(_unready, self.members)), *_external_problems(self.services)])
        for member in self.members:
            member.keep()

    def settle(self, folder: Path) -> None:
        """Move the services' output to the run's folder. From now on, their state is recorded there too."""
        own = folder / served.FOLDER
        try:
            for member in self.members:
                own.mkdir(exist_ok=True)
                member.move_log(own)
        except OSError as error:
            self._note(f"the output of services cannot be moved into the run's folder: {error.strerror}")
        self._folder = folder
        self._show()

    def close(self, ended_well: bool = False) -> None:
        """End all processes that were started.

        ``ended_well``: whether the run succeeded. If so, each process keeps running for its ``delay`` first.
        """
        waited = 0.0
        try:
            for delay in sorted({member.recipe.delay for member in self.members}) if ended_well else ():
                self._closing.wait(delay - waited)
                waited = delay
                _end([member for member in self.members if member.recipe.delay == delay])
        finally:
            _end(self.members)
            self._unpublish()
            self._clear()

    def _unpublish(self) -> None:
        for name, value in self._before.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)

    def _clear(self) -> None:
        if self.members:
            shutil.rmtree(self._logs, ignore_errors=True)

    def _changed(self) -> None:
        """Update services.json, and the file that tells clients how long services may be unavailable."""
        # without this file, a request does not wait beyond its own deadline
        with self._lock, contextlib.suppress(OSError):
            self._outages.last_until(
                max((member.until for member in self.members if member.state == "starting"), default=0.0)
            )
        self._show()

    def _show(self) -> None:
        """Write services.json to the run's folder. If this fails, the services keep running."""
        with self._lock:
            if self._folder is None or not self.services:
                return
            try:
                elsewhere = [
                    ServedProcess(each.name, each.run, each.run, "elsewhere")
                    for each in self.services
                    if each.external
                ]
                served.write(self._folder, [*map(self._shown, self.members), *elsewhere])
            except OSError as error:
                self._note(f"{served.FILE} cannot be written: {error.strerror}")

    def _shown(self, member: Member) -> ServedProcess:
        log = (
            member.log
            if self._folder is None or not member.log.is_relative_to(self._folder)
            else member.log.relative_to(self._folder)
        )
        return ServedProcess(
            member.recipe.name,
            shlex.join(member.recipe.command),
            member.recipe.url,
            member.state,
            member.starts,
            member.process.pid if member.process else 0,
            str(log),
        )


def _start(member: Member) -> None:
    try:
        member.start()
    except OSError as error:
        name, command = member.recipe.name, member.recipe.command
        raise PlanError.of(
            "service-start",
            f"service '{name}' cannot be started: {masked(shlex.join(command))}",
            found=f"{error.strerror}: {error.filename or command[0]}",
            expected="an executable program",
            remedy=f"correct --{HEAD}.{name}; it is not run by a shell: for shell syntax write bash -c '…'",
        ) from error


def _unready(member: Member) -> Problem | None:
    """Wait for a service that the run has started. Return a problem if it doesn't serve, or None if it does."""
    why = member.wait_until_serving()
    if not why:
        return None
    recipe = member.recipe
    printed = "".join(f"\n    {line}" for line in masked(last_lines(member.log)).splitlines())
    output = f"; its last output:{printed}" if printed else "; it printed nothing"
    return Problem(
        "service-wait",
        f"service '{recipe.name}' does not serve: {masked(shlex.join(recipe.command))}",
        found=f"{why}{output}",
        expected=f"within {recipe.wait:g} s {_sign(recipe.url, recipe.health)}",
        remedy=f"let it listen on the port given as {{port}} in its command or in the variable {PORT}; "
        f"set its health path and time limit with --{HEAD}.{recipe.name}.health PATH and "
        f"--{HEAD}.{recipe.name}.wait SECONDS",
    )


def _sign(url: str, health: str) -> str:
    """Describe the response that shows that a service is working."""
    return f"status 200 from {url}{health}" if health else f"a connection at {url}"


def _external_problems(services: Iterable[Service]) -> Iterator[Problem]:
    """Wait for the services that the run doesn't start, and yield a problem for each one that doesn't serve."""
    for each in services:
        if each.external and (why := _wait_for_external(each)):
            yield Problem(
                "service-wait",
                f"service '{each.name}', which this run does not start, does not serve",
                found=why,
                expected=f"within {each.wait:g} s {_sign(each.run.rstrip('/'), each.health)}",
                remedy=f"start it, or correct --{HEAD}.{each.name} URL and --{HEAD}.{each.name}.health PATH",
            )


def _wait_for_external(service: Service) -> str:
    """Wait until a service is serving. Return "", or the reason if it isn't serving within its ``wait``."""
    limit, turn = time.monotonic() + service.wait, threading.Event()
    while why := unhealthy(service.run.rstrip("/"), service.health, PROBE):
        if time.monotonic() > limit:
            return why
        turn.wait(LOOK)
    return ""


def _end(members: Iterable[Member]) -> None:
    """Ask all processes to end, then kill those that don't end in time."""
    there = [member for member in members if not member.over]
    for member in there:
        member.ask_to_end()
    limit = time.monotonic() + GRACE
    for member in there:
        member.end(max(limit - time.monotonic(), 0.0))
