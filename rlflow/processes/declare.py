"""Declarations of services: ``[service.NAME]`` in a configuration file, or ``--service.NAME COMMAND``.

In a service's command, ``{port}`` stands for the port it must listen on. In the value of any flag, and in the
commands of other services, ``{NAME}`` stands for the service's URL. This module only reads declarations; it
doesn't start or contact anything. Runs and cluster jobs share these declarations: a run starts its services
itself, while in a job each service is a task.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any
from urllib.parse import urlsplit

from annotated_types import Ge, Gt

from rlflow.author.settings import override
from rlflow.errors import PlanError, Problem, listed, nearest

HEAD = "service"  # prefix of the flags: --service.NAME, --service.NAME.wait
# prefix of the variables in which rewards and environments find the URLs of services
VARIABLE = "RLFLOW_SERVICE_"
PORT = "PORT"  # the variable in which a service finds its port, like {port} in its command
NAME = re.compile(r"[A-Za-z]\w*")
URLS = ("http://", "https://")  # prefixes of the URL of a service that others run
# names that services can't have because they mean something else: {port} here, {prompt} in --data.template
RESERVED = ("port", "prompt")
BRACED = re.compile(r"\{(\w+)\}")
# A value that is the URL of a service, optionally after NAME= or NAME:
URL_OF = re.compile(r"(?:[\w.-]+[=:])?\{(\w+)\}(?:/.*|:[\d.]+)?", re.DOTALL)


@dataclass(frozen=True)
class ServiceSettings:
    """Settings of a service.

    Each field is a flag, --service.NAME.FIELD, and a key in [service.NAME]. The comment on a field is its
    help text.
    """

    # command of the service, with {port} for its port; or the URL of a service that others run, for which the
    # run only waits
    run: str = ""
    # path that answers with status 200 when the service is ready; empty: ready when it accepts connections
    health: str = "/health"
    # seconds that it may take until ready, and later seconds without an answer or activity before it is ended
    wait: Annotated[float, Gt(0)] = 60.0
    delay: Annotated[float, Ge(0)] = 0.0  # seconds for which it keeps running after a successful run
    cpus: Annotated[int, Ge(1)] | None = None  # threads for its arithmetic; in a job, cores of its task
    gpus: Annotated[int, Ge(0)] = 0  # GPUs of its process, which the run cannot use


@dataclass(frozen=True, kw_only=True)
class Service(ServiceSettings):
    """A service as the user declared it."""

    name: str

    @property
    def external(self) -> bool:
        """Whether ``run`` is a URL, which means that the run doesn't start this service."""
        return self.run.startswith(URLS)

    @property
    def variable(self) -> str:
        """The environment variable that tells rewards and environments the service's URL."""
        return VARIABLE + self.name.upper()

    @property
    def words(self) -> list[str]:
        """The command, split into words as a shell would. No shell is involved in running it."""
        return shlex.split(self.run)

    def command(self, port: int | str, urls: Mapping[str, str]) -> list[str]:
        """Return the words of the command with the port and the URLs of services filled in.

        ``urls``: the URL of each service, by name.
        """
        return [in_place(word, {**urls, "port": str(port)}) for word in self.words]


def split_services(values: Mapping[str, Any]) -> tuple[tuple[Service, ...], dict[str, Any]]:
    """Return the declared services in order, and the remaining flags unchanged.

    ``values``: the flags by name, without dashes, as ``parse_flags`` and ``read_toml`` return them. Raises a
    single PlanError that lists the errors of all services.
    """
    written: dict[str, dict[str, Any]] = {}
    others: dict[str, Any] = {}
    for flag, value in values.items():
        head, _, rest = flag.partition(".")
        if head != HEAD:
            others[flag] = value
            continue
        name, _, setting = rest.partition(".")
        written.setdefault(name, {})[setting or "run"] = value
    services: list[Service] = []
    problems: list[Problem] = []
    for name, settings in written.items():
        try:
            services.append(_service(name, settings))
        except PlanError as error:
            problems += error.problems
    problems += [*_alike(written), *_unknown(others, written)]
    problems += [problem for each in services for problem in _commands(each, written)]
    PlanError.refuse(problems or _circle(services))
    return tuple(services), others


def in_place(value: Any, urls: Mapping[str, str]) -> Any:
    """Replace each ``{NAME}`` in a flag's value, also inside lists, with the URL of the service NAME.

    ``urls``: the URL of each service, by name. Other braces stay as they are.
    """
    if isinstance(value, str):
        return BRACED.sub(lambda match: urls.get(match[1], match[0]), value)
    if isinstance(value, list | tuple):
        return type(value)(in_place(each, urls) for each in value)
    return value


def from_environment(value: Any) -> Any:
    """Replace each ``{NAME}`` in ``value`` with the URL of the service NAME, found in the environment.

    Environments fill in the URLs in their own processes. Until then, their settings keep ``{NAME}``, because
    they are part of the flow's graph, which must stay the same if a resumed run uses other ports.
    """
    return in_place(value, _FromEnvironment())


class _FromEnvironment(dict[str, str]):
    """The URL of each service by name, looked up in environment variables."""

    def get(self, name: str, default: Any = None) -> Any:
        """Return the URL of the service ``name``, or ``default`` if there is no such service."""
        return os.environ.get(VARIABLE + name.upper(), default)


def short(flag: str) -> str:
    """Shorten --service.NAME.run to --service.NAME. Other flags are returned unchanged."""
    return flag.removesuffix(".run") if flag.startswith(f"{HEAD}.") and flag.count(".") == 2 else flag


def may_change(flag: str, value: Any, recorded: Mapping[str, Any]) -> bool:
    """Whether a flag about a service may be given when a run is resumed.

    You can change settings other than the command, repeat the same command, or give a new URL for a service
    that the run doesn't start. ``recorded``: the flags that the run was started with.
    """
    head, _, rest = flag.partition(".")
    name, _, setting = rest.partition(".")
    before = next(
        (recorded[each] for each in (f"{HEAD}.{name}", f"{HEAD}.{name}.run") if each in recorded), None
    )
    if head != HEAD or before is None:
        return False
    return (
        setting not in ("", "run")
        or value == before
        or all(str(each).startswith(URLS) for each in (value, before))
    )


def command_from(value: Any, start: str) -> Any:
    """Return a service's command with relative paths made to start from the folder ``start``.

    A path is only changed if it exists in ``start`` but not in the current folder.
    """
    words = shlex.split(value) if isinstance(value, str) and not value.startswith(URLS) else []
    moved = [_moved(word, start) for word in words]
    return shlex.join(moved) if moved != words else value


def _moved(word: str, start: str) -> str:
    path, function, _rest = word.partition(".py:")  # a function as in --reward FILE.py:function
    whole = path + ".py" if function else path
    lost = (
        not os.path.isabs(whole) and not os.path.exists(whole) and os.path.exists(os.path.join(start, whole))
    )
    return os.path.join(start, word) if lost else word


def nowhere(services: Iterable[Service]) -> dict[str, str]:
    """Return a placeholder URL for each service, by name, for checks that don't start services.

    Services that the run doesn't start keep their real URL.
    """
    return {
        each.name: each.run.rstrip("/") if each.external else f"http://{each.name.replace('_', '-')}.invalid"
        for each in services
    }


def _service(name: str, settings: Mapping[str, Any]) -> Service:
    flag = f"{HEAD}.{name}"
    if not NAME.fullmatch(name) or name in RESERVED:
        raise PlanError.of(
            "service-name",
            f"--{flag} is not a valid service name",
            found=name or "no name",
            expected=f"letters, digits and '_', beginning with a letter, except {listed(RESERVED)}",
            remedy="--service.search COMMAND",
        )
    read = override(ServiceSettings(), settings, f"{flag}.")
    service = Service(name=name, **vars(read))
    _check_run(service)
    if service.health and not service.health.startswith("/"):
        raise PlanError.of(
            "service-health",
            f"the setting '{flag}.health' is not a path",
            found=service.health,
            expected="a path such as /health, or an empty text",
            remedy=f"--{flag}.health /{service.health}",
        )
    return service


def _check_run(service: Service) -> None:
    """Raise PlanError if a service has no command, a command with unclosed quotes, or an invalid URL."""
    flag, others = (
        f"--{HEAD}.{service.name}",
        [entry.name for entry in dataclasses.fields(ServiceSettings) if entry.name != "run"],
    )
    try:
        words = service.words
    except ValueError as error:
        raise PlanError.of(
            "service-run",
            f"the command of service '{service.name}' cannot be split into words",
            found=service.run,
            expected=f"words as a shell reads them ({error})",
            remedy="close the quotes",
        ) from None
    if not words:
        raise PlanError.of(
            "service-run",
            f"service '{service.name}' has no command",
            found=f"no {flag}",
            nearest=None,
            expected=f"a command or a URL; further settings: {listed(others)}",
            remedy=f'{flag} "rlflow serve retrieve corpus.jsonl", or run = "…" in [{HEAD}.{service.name}]',
        )
    if service.external and (len(words) > 1 or not _askable(service.run)):
        raise PlanError.of(
            "service-url",
            f"the URL of service '{service.name}' is invalid",
            expected="http://HOST:PORT, without a user name",
            found=service.run.partition("://")[0] + "://…@…" if "@" in service.run else service.run,
            remedy=f"{flag} http://127.0.0.1:8000, with the host and port of the service",
        )
    own = [
        name
        for name in ("delay", "cpus", "gpus")
        if getattr(service, name) != getattr(ServiceSettings(), name)
    ]
    if service.external and own:
        raise PlanError.of(
            "service-url",
            f"service '{service.name}' is run by others, so that the run cannot set its {own[0]}",
            found=f"{flag}.{own[0]} together with a URL",
            expected=f"only {flag}.health and {flag}.wait",
            remedy=f"remove {flag}.{own[0]}",
        )


def _askable(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return (
            bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and parts.username is None
            and not parts.query
        )
    except ValueError:  # invalid port
        return False


def _alike(names: Iterable[str]) -> list[Problem]:
    """Return a problem for each name that has the same environment variable as an earlier name."""
    first: dict[str, str] = {}
    return [
        Problem(
            "service-name",
            f"services '{first[name.upper()]}' and '{name}' differ only in upper and lower case",
            found=name,
            expected=f"only one service for the variable {VARIABLE}{name.upper()}",
            remedy="rename one of them",
        )
        for name in names
        if first.setdefault(name.upper(), name) != name
    ]


def _unknown(values: Mapping[str, Any], names: Iterable[str]) -> list[Problem]:
    """Return a problem for each value of a flag that refers to an undeclared service, as in ``{NAME}/path``.

    There may be a ``NAME=`` or ``NAME:`` in front of the braces.
    """
    names = list(names)
    texts = [
        (flag, text)
        for flag, value in values.items()
        if flag.partition(".")[0] != "data"
        for text in (value if isinstance(value, list | tuple) else [value])
        if isinstance(text, str)
    ]
    return [
        Problem(
            "service-unknown",
            f"--{flag} names an undeclared service",
            found=text,
            expected=f"one of {listed(f'{{{name}}}' for name in names)}"
            if names
            else f"a service: --{HEAD}.{match[1]} COMMAND",
            nearest=nearest(match[1], names),
            remedy=f"declare it: --{HEAD}.{match[1]} COMMAND, or [{HEAD}.{match[1]}]",
        )
        for flag, text in texts
        if (match := URL_OF.fullmatch(text)) and match[1] not in names
    ]


def _circle(services: Iterable[Service]) -> list[Problem]:
    """Return a problem if the commands of services need each other in a circle, or if one needs itself.

    Such services could never start, because each would have to wait for another.
    """
    asks = {each.name: {name for word in each.words for name in BRACED.findall(word)} for each in services}
    try:
        TopologicalSorter({name: named & asks.keys() for name, named in asks.items()}).prepare()
    except CycleError as error:
        first, *others = circle = error.args[1][::-1]
        return [
            Problem(
                "service-circle",
                f"the command of service '{first}' needs itself"
                if len(circle) == 2
                else f"services {listed(circle[:-1])} need one another",
                found=" → ".join(f"{{{name}}}" for name in circle),
                expected="commands of services that do not need one another",
                remedy=f"remove {{{others[0]}}} from --{HEAD}.{first}; a service's own port is {{port}}",
            )
        ]
    return []


def _commands(service: Service, names: Iterable[str]) -> list[Problem]:
    """Return a problem for each word of a service's command that refers to an undeclared service."""
    known = (*names, "port")
    return [
        Problem(
            "service-unknown",
            f"the command of service '{service.name}' names an undeclared service",
            found=word,
            expected=f"one of {listed(f'{{{name}}}' for name in known)}",
            nearest=nearest(match[1], known),
            remedy=f"declare it: --{HEAD}.{match[1]} COMMAND",
        )
        for word in service.words
        if (match := URL_OF.fullmatch(word)) and match[1] not in known
    ]
