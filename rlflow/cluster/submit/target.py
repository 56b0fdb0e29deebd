"""What a run needs from a cluster: its command, machines and services, and the names of its secrets."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from annotated_types import Ge

from rlflow.author.settings import override
from rlflow.cluster.submit.keeping import FLAG as KEEP
from rlflow.cluster.submit.keeping import Keep, keep_of, warning
from rlflow.compiler.placement import Pools
from rlflow.config.flags import pools_of
from rlflow.config.meant import SWITCHES
from rlflow.errors import PlanError, listed, printable
from rlflow.monitoring.secrets import masked, telling
from rlflow.processes.declare import Service, in_place, split_services

Kind = Literal["skypilot", "kuberay", "ray", "slurm"]
KINDS: tuple[Kind, ...] = get_args(Kind)
HEAD = "job"  # prefix of the launch flags, as in --job.nodes
FIRST_PORT = 8001  # first port of services; others follow
RAY_PORT = 6379  # port of Ray's head
RAY_HERE = f"127.0.0.1:{RAY_PORT}"  # Ray's head, on its own machine
# a variable in host names of a job group, which the shell of a task expands
GROUP = "${SKYPILOT_JOBGROUP_NAME}"
TOKEN = "RAY_AUTH_TOKEN"  # all machines of a Ray cluster have the same token
# token of `rlflow serve` if it listens on addresses that other machines can reach
SERVE_TOKEN = "RLFLOW_SERVE_TOKEN"
# tracker → environment variables that it reads
TRACKERS = {"wandb": ("WANDB_API_KEY",), "mlflow": ("MLFLOW_TRACKING_URI",)}
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class JobSettings:
    """Settings of the machines for `rlflow job`. Each field is a flag, --job.FIELD."""

    nodes: Annotated[int, Ge(1)] = 1  # machines of the run; several machines join one Ray cluster
    accelerators: str | None = None  # accelerators of each machine, as H100:8, or None for CPUs only
    cpus: Annotated[int, Ge(1)] | None = None  # minimum cores of each machine
    # container image with rlflow installed, or None to let SkyPilot install it
    image: str | None = None
    # address of Ray's job server for --for ray, http://HOST:8265, by default RAY_ADDRESS
    address: str | None = None
    # storage of the run's folder: URL of a bucket, name of a volume's claim, or an absolute path
    keep: str | None = None
    time: str | None = None  # time limit of a Slurm job, such as 1-12:00:00
    seeds: str | None = None  # for Slurm: a job for each of these seeds, such as 0-4
    # names of environment variables with secrets; repeat the flag for several
    secret: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchTarget:
    """A run to be started elsewhere, with its machines, services and secrets."""

    name: str
    file: str  # the algorithm's file as the user typed it, or a shipped algorithm's name
    flags: Mapping[str, Any]  # flags of the run, without flags of services
    services: tuple[Service, ...]
    settings: JobSettings
    secrets: tuple[str, ...]  # names of environment variables
    keep: Keep | None  # storage of the run's folder
    warnings: tuple[str, ...]  # warnings for the user who starts the run

    @property
    def accelerators(self) -> tuple[str, int]:
        """The name and number of accelerators of each machine."""
        name, _, count = (self.settings.accelerators or "").partition(":")
        return name, int(count or 1) if name else 0

    @property
    def apart(self) -> bool:
        """Whether the run uses several machines, which form one Ray cluster."""
        return self.settings.nodes > 1

    @property
    def on_ray(self) -> bool:
        """Whether the run has pools of Ray workers."""
        return has_ray_pools(self.flags)

    @property
    def own(self) -> list[tuple[Service, int]]:
        """The services to start together with the run. Each has a port."""
        return [
            (service, FIRST_PORT + number)
            for number, service in enumerate(each for each in self.services if not each.external)
        ]

    def command(
        self,
        urls: Mapping[str, str],
        file: str | None = None,
        started: bool = False,
        ray: str = RAY_HERE,
        name: str | None = None,
    ) -> str:
        """Return the shell command that starts the run.

        ``urls``: service → its URL, which may contain variables for the shell to expand. The run waits for
        these services instead of starting them. ``file``: the algorithm's path, by default as the user typed
        it. ``started``: whether the run starts its services itself. ``ray``: the address of the Ray cluster
        that several machines join, quoted for a shell. ``name``: the run's name, quoted for a shell. By
        default, it's the name of the launch if the run has storage; otherwise, there is none.
        """
        known = {service.name: service.run for service in self.services if service.external} | dict(urls)
        values = {flag: value if started else in_place(value, known) for flag, value in self.flags.items()}
        words = ["rlflow", "run", shlex.quote(file or self.file)]
        for flag, value in values.items():
            for each in value if isinstance(value, list | tuple) else [value]:
                words += _words(flag, each)
        for service in self.services:
            words += _of_service(service, known.get(service.name), started)
        named = {}
        if self.keep is not None:
            named["out"] = shlex.quote(self.keep.out)
        if self.keep is not None or name is not None:
            named |= {"name": name or shlex.quote(self.name), "resume": "auto"}
        if self.apart and "ray_address" not in values:
            named["ray-address"] = ray
        words += [word for flag, text in named.items() if flag not in values for word in (f"--{flag}", text)]
        return " ".join(words)


def _words(flag: str, value: Any) -> list[str]:
    """Return a flag and its value as words of a shell command."""
    text = _text(value)
    if flag in SWITCHES:
        return [f"--{flag}"] if value is True else []
    if text.startswith("--"):  # as a separate word it would be read as the next flag
        return [shlex.quote(f"--{flag}=") + quoted(text)]
    return [shlex.quote(f"--{flag}"), quoted(text)]


def has_ray_pools(flags: Mapping[str, Any]) -> bool:
    """Return whether a run's flags name pools of Ray workers. Raises PlanError for invalid pools.

    A run without pools, or with pools of threads, is a single process.
    """
    return bool(pools := pools_of(flags)) and not Pools(str(pools)).threads


def _of_service(service: Service, url: str | None, started: bool) -> list[str]:
    flag = f"--service.{service.name}"
    words = [
        flag,
        quoted(service.run if started or url is None else url),
        f"{flag}.wait",
        f"{service.wait:g}",
    ]
    words += [f"{flag}.health", shlex.quote(service.health)] if service.health != "/health" else []
    if started and not service.external:
        words += [f"{flag}.delay", f"{service.delay:g}"]
        words += [f"{flag}.cpus", str(service.cpus)] if service.cpus else []
        words += [f"{flag}.gpus", str(service.gpus)] if service.gpus else []
    return words


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else json.dumps(value)
        if isinstance(value, dict)
        else str(value)
    )


def quoted(text: str) -> str:
    """Quote a word for a shell, so that nothing in it is expanded except GROUP."""
    return f'"{GROUP}"'.join(shlex.quote(part) if part else "" for part in text.split(GROUP)) or "''"


def target_of(file: str, values: Mapping[str, Any]) -> tuple[Kind, LaunchTarget]:
    """From the flags of `rlflow job`, return the document's form and the run to start.

    Raises PlanError if the form or the machines are missing. Also raises PlanError if a flag contains a
    secret, because the printed document may be shared.
    """
    flags = dict(values)
    kind = flags.pop("for", None)
    if kind not in KINDS:
        raise PlanError.of(
            "job-for",
            "--for is missing or unknown",
            found=str(kind or "no --for"),
            expected="skypilot, kuberay, ray or slurm",
            remedy="for example --for skypilot",
        )
    own = {flag.partition(".")[2]: flags.pop(flag) for flag in list(flags) if flag.startswith(f"{HEAD}.")}
    settings = override(
        JobSettings(), {**own, **({"secret": _several(own["secret"])} if "secret" in own else {})}, f"{HEAD}."
    )
    services, others = split_services(flags)
    name = (
        re.sub(
            r"[^a-z0-9-]+", "-", str(others.get("name") or Path(file.partition("::")[0]).stem).lower()
        ).strip("-")
        or "run"
    )
    _check_text({**values, "FILE": file})
    _check(settings, services, others)
    if kind != "slurm" and (slurm := [name for name in ("time", "seeds") if getattr(settings, name)]):
        raise PlanError.of(
            "job-for",
            f"--{HEAD}.{slurm[0]} is a setting of Slurm",
            found=f"--for {kind}",
            expected="--for slurm",
            remedy=f"remove --{HEAD}.{slurm[0]}",
        )
    keep = None if settings.keep is None else keep_of(settings.keep, kind)
    if keep is not None and "out" in others:
        raise PlanError.of(
            "job-keep",
            "two flags set the place of the run's folder",
            found=f"--out and {KEEP}",
            expected="one of them",
            remedy="remove --out",
        )
    warnings = tuple(warning(kind, keep, str(others.get("out", ""))))
    return kind, LaunchTarget(
        name, file, others, services, settings, _secrets(settings, services, others), keep, warnings
    )


def _several(value: Any) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list | tuple) else (str(value),)


def _secrets(settings: JobSettings, services: Sequence[Service], flags: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the environment variables that hold the secrets the run needs.

    These are the variables named by the user, those of the trackers, and the tokens of Ray and of services.
    """
    trackers = [name for tracker in _several(flags.get("track", ())) for name in TRACKERS.get(tracker, ())]
    serving = (
        [SERVE_TOKEN]
        if any(service.words[:2] == ["rlflow", "serve"] for service in services if not service.external)
        else []
    )
    return tuple(
        dict.fromkeys([*settings.secret, *trackers, *([TOKEN] if settings.nodes > 1 else []), *serving])
    )


def _check_text(values: Mapping[str, Any]) -> None:
    """Raise PlanError if a flag's text can't be part of a command line (NUL, or not UTF-8)."""
    for flag, value in values.items():
        for text in (flag, *map(_text, value if isinstance(value, list | tuple) else [value])):
            if "\0" in text or text != text.encode(errors="replace").decode():
                raise PlanError.of(
                    "job-text",
                    f"--{printable(ascii(flag)[1:-1])} cannot be part of a command",
                    found=ascii(text),
                    expected="text in UTF-8 without NUL",
                    remedy="remove these characters",
                )


def _check(settings: JobSettings, services: Sequence[Service], flags: Mapping[str, Any]) -> None:
    """Raise PlanError if a flag contains a secret, or if the run can't use the machines."""
    texts = {flag: str(value) for flag, value in flags.items()} | {
        f"service.{service.name}": service.run for service in services
    }
    secret_flags = [
        flag
        for flag, text in texts.items()
        if (telling(flag.rpartition(".")[2]) and text) or masked(text) != text
    ]
    wrong = [name for name in settings.secret if not VARIABLE.fullmatch(name)]
    if secret_flags or wrong:
        where = (
            listed(f"--{flag}" for flag in secret_flags)
            if secret_flags
            else f"--{HEAD}.secret with {len(wrong[0])} characters"
        )
        raise PlanError.of(
            "job-secret",
            "a secret must not be part of the printed text",
            found=where,
            expected="names of environment variables",
            remedy=f"export NAME=…, and pass --{HEAD}.secret NAME",
        )
    if settings.nodes > 1 and not has_ray_pools(flags):
        raise PlanError.of(
            "job-nodes",
            f"the run uses one machine of {settings.nodes}, because it has no pools of processes",
            found=f"--{HEAD}.nodes {settings.nodes}",
            expected=f"--pools, or --{HEAD}.nodes 1",
            remedy="set --pools train=8,rollout=8 or --pools all=16",
        )
    if not re.fullmatch(r"([A-Za-z][\w.-]*(:[1-9][0-9]*)?)?", settings.accelerators or ""):
        raise PlanError.of(
            "job-accelerators",
            f"--{HEAD}.accelerators is not NAME:COUNT",
            found=str(settings.accelerators),
            expected="NAME:COUNT of each machine",
            remedy=f"set --{HEAD}.accelerators H100:8",
        )
