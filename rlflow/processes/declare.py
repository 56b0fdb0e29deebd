"""The declaration of a run's services: ``[service.NAME]`` in a configuration file, or ``--service.NAME
COMMAND``.

``{port}`` in a command is the port at which it is to listen, and ``{NAME}`` in the value of any flag, or in
another service's command, the service's URL. What stands here is text and numbers: nothing is started or
looked up. The same declaration serves a run, which starts its services itself, and a job on a cluster, where
each is a task of its own.
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

HEAD = "service"  # begins the flags: --service.NAME, --service.NAME.wait
VARIABLE = "RLFLOW_SERVICE_"  # begins the variables in which rewards and environments find URLs
PORT = "PORT"  # the variable in which a service finds its port, beside {port} in its command
NAME = re.compile(r"[A-Za-z]\w*")
URLS = ("http://", "https://")  # begin the URL of a service that others run
RESERVED = ("port", "prompt")  # what {port} and --data.template's {prompt} mean elsewhere
BRACED = re.compile(r"\{(\w+)\}")
# a value that is a service's URL, also after NAME= or NAME:
URL_OF = re.compile(r"(?:[\w.-]+[=:])?\{(\w+)\}(?:/.*|:[\d.]+)?", re.DOTALL)


@dataclass(frozen=True)
class ServiceSettings:
    """The settings of a service. Every field is a flag, --service.NAME.FIELD, and a key of [service.NAME];
    its comment is its help."""

    # its command, in which {port} is its port; or the URL of a service that others run, which is waited for
    # only
    run: str = ""
    # path that answers with status 200 once it serves; empty: it serves once it takes connections
    health: str = "/health"
    # seconds that it may take until then; for as long it may be silent and idle before it is ended
    wait: Annotated[float, Gt(0)] = 60.0
    delay: Annotated[float, Ge(0)] = 0.0  # seconds for which it goes on after a run that has ended well
    cpus: Annotated[int, Ge(1)] | None = None  # threads of its arithmetic; of a job's task its cores
    gpus: Annotated[int, Ge(0)] = 0  # GPUs of its process, which the run then has not


@dataclass(frozen=True, kw_only=True)
class Service(ServiceSettings):
    """A declared service."""

    name: str

    @property
    def external(self) -> bool:
        """Whether others run it: its ``run`` is a URL."""
        return self.run.startswith(URLS)

    @property
    def variable(self) -> str:
        """The environment variable in which rewards and environments find its URL."""
        return VARIABLE + self.name.upper()

    @property
    def words(self) -> list[str]:
        """The words of its command, as a shell would split it; no shell carries it out."""
        return shlex.split(self.run)

    def command(self, port: int | str, urls: Mapping[str, str]) -> list[str]:
        """The words of its command with its port and the URLs of services (name → URL) in place."""
        return [in_place(word, {**urls, "port": str(port)}) for word in self.words]


def split_services(values: Mapping[str, Any]) -> tuple[tuple[Service, ...], dict[str, Any]]:
    """The services that flags declare, in their order, and the other flags as they came. ``values``: flag
    without its dashes → value, as ``parse_flags`` and ``read_toml`` give them. Raises PlanError with all that
    is wrong."""
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
    """A flag's value with the URL of each service in place of ``{NAME}``; text alone has any, by itself or in
    a list. Other braces stay."""
    if isinstance(value, str):
        return BRACED.sub(lambda match: urls.get(match[1], match[0]), value)
    if isinstance(value, list | tuple):
        return type(value)(in_place(each, urls) for each in value)
    return value


def from_environment(value: Any) -> Any:
    """A value with the URLs in place that this process's environment has of services. Settings of
    environments get theirs so, since a flow's graph has them and must not differ from one start of a run to
    the next."""
    return in_place(value, _FromEnvironment())


class _FromEnvironment(dict[str, str]):
    """The URLs of services by name, as variables of the environment have them."""

    def get(self, name: str, default: Any = None) -> Any:
        """The URL of a service; ``default`` for any other name."""
        return os.environ.get(VARIABLE + name.upper(), default)


def short(flag: str) -> str:
    """A flag, of which --service.NAME.run, as a table of a file has it, is --service.NAME."""
    return flag.removesuffix(".run") if flag.startswith(f"{HEAD}.") and flag.count(".") == 2 else flag


def may_change(flag: str, value: Any, recorded: Mapping[str, Any]) -> bool:
    """Whether a flag may be given to a run that goes on: of its services what does not decide on their
    answers, the same command again, and another URL in place of a URL. ``recorded``: the flags with which the
    run was started."""
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
    """A service's command in which relative paths that lead nowhere from here, but do from the folder
    ``start``, lead from there."""
    words = shlex.split(value) if isinstance(value, str) and not value.startswith(URLS) else []
    moved = [_moved(word, start) for word in words]
    return shlex.join(moved) if moved != words else value


def _moved(word: str, start: str) -> str:
    path, function, rest = word.partition(".py:")  # as --reward FILE.py:function has it
    whole = path + ".py" if function else path
    lost = (
        not os.path.isabs(whole) and not os.path.exists(whole) and os.path.exists(os.path.join(start, whole))
    )
    return os.path.join(start, word) if lost else word


def nowhere(services: Iterable[Service]) -> dict[str, str]:
    """URLs (by name) for services that are not started, to judge with: of others' services their own, else
    ones that lead nowhere."""
    return {
        each.name: each.run.rstrip("/") if each.external else f"http://{each.name.replace('_', '-')}.invalid"
        for each in services
    }


def _service(name: str, settings: Mapping[str, Any]) -> Service:
    flag = f"{HEAD}.{name}"
    if not NAME.fullmatch(name) or name in RESERVED:
        raise PlanError.of(
            "service-name",
            f"--{flag} names no service",
            found=name or "no name",
            expected=f"letters, digits and '_', the first one a letter, and not {listed(RESERVED)}",
            remedy="--service.search COMMAND",
        )
    read = override(ServiceSettings(), settings, f"{flag}.")
    service = Service(name=name, **vars(read))
    _check_run(service)
    if service.health and not service.health.startswith("/"):
        raise PlanError.of(
            "service-health",
            f"the setting '{flag}.health' is no path",
            found=service.health,
            expected="a path such as /health, or an empty text",
            remedy=f"--{flag}.health /{service.health}",
        )
    return service


def _check_run(service: Service) -> None:
    """Raises PlanError for a service without a command, one whose quotes do not end, and a URL that cannot be
    asked."""
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
            expected=f"a command or a URL; {listed(others)} say more of it",
            remedy=f'{flag} "rlflow serve retrieve corpus.jsonl", or run = "…" in [{HEAD}.{service.name}]',
        )
    if service.external and (len(words) > 1 or not _askable(service.run)):
        raise PlanError.of(
            "service-url",
            f"the URL of service '{service.name}' cannot be asked",
            expected="http://HOST:PORT, without a user's name",
            found=service.run.partition("://")[0] + "://…@…" if "@" in service.run else service.run,
        )
    own = [
        name
        for name in ("delay", "cpus", "gpus")
        if getattr(service, name) != getattr(ServiceSettings(), name)
    ]
    if service.external and own:
        raise PlanError.of(
            "service-url",
            f"service '{service.name}' is run by others, who decide on its {own[0]}",
            found=f"{flag}.{own[0]} beside a URL",
            expected=f"{flag}.health and {flag}.wait alone",
            remedy=f"leave out {flag}.{own[0]}",
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
    except ValueError:  # no port
        return False


def _alike(names: Iterable[str]) -> list[Problem]:
    """Names that give the same variable."""
    first: dict[str, str] = {}
    return [
        Problem(
            "service-name",
            f"services '{first[name.upper()]}' and '{name}' differ in case alone",
            found=name,
            expected=f"one of them to give the variable {VARIABLE}{name.upper()}",
            remedy="give one another name",
        )
        for name in names
        if first.setdefault(name.upper(), name) != name
    ]


def _unknown(values: Mapping[str, Any], names: Iterable[str]) -> list[Problem]:
    """Values that are the URL of a service, also after NAME= or NAME:, although there is no such service."""
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
            f"--{flag} names a service that is not declared",
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
    """Services whose commands name one another in a circle, or themselves: each would be there before the
    other."""
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
                expected="commands that name services which do not need theirs",
                remedy=f"leave out {{{others[0]}}} of --{HEAD}.{first}; a service's own port is {{port}}",
            )
        ]
    return []


def _commands(service: Service, names: Iterable[str]) -> list[Problem]:
    """Words of a command that are the URL of a service, also after NAME= or NAME:, that is not declared."""
    known = (*names, "port")
    return [
        Problem(
            "service-unknown",
            f"the command of service '{service.name}' names a service that is not declared",
            found=word,
            expected=f"one of {listed(f'{{{name}}}' for name in known)}",
            nearest=nearest(match[1], known),
            remedy=f"declare it: --{HEAD}.{match[1]} COMMAND",
        )
        for word in service.words
        if (match := URL_OF.fullmatch(word)) and match[1] not in known
    ]
