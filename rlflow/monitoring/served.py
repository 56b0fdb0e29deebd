"""The services of a run as its folder shows them: services.json, and a file with what each process of theirs
prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rlflow.checkpoints import durable
from rlflow.monitoring.secrets import masked

FILE, FOLDER = "services.json", "services"


@dataclass(frozen=True)
class ServedProcess:
    """One process of a service, or a service that others run."""

    name: str  # of the service
    command: str  # with its port; the URL of a service that others run
    url: str  # at which it listens
    state: str  # starting, serving, silent, dead (and not started again), ended, or elsewhere: others run it
    starts: int = 0  # how often it was started
    pid: int = 0  # of its process, of which another may have the number by now; 0 where there is none
    log: str = ""  # the file with what it prints, below the run's folder


def write(folder: Path, processes: Iterable[ServedProcess]) -> None:
    """Write services.json of a run's folder, whole, without secrets. Raises OSError."""
    text = json.dumps([asdict(each) for each in processes], indent=1)
    durable.replace(folder / FILE, f"{masked(text)}\n".encode(), flush=False)


def read(folder: Path) -> list[ServedProcess]:
    """The processes of services.json of a run's folder; nothing where there is none that can be read."""
    try:
        content = json.loads(durable.read(folder / FILE))
    except (OSError, ValueError, RecursionError):
        return []
    kinds = {entry.name: int if entry.type == "int" else str for entry in fields(ServedProcess)}
    fits = (
        each
        for each in (content if isinstance(content, list) else ())
        if isinstance(each, dict) and all(isinstance(each.get(name), kind) for name, kind in kinds.items())
    )
    return [ServedProcess(**{name: each[name] for name in kinds}) for each in fits]


def lines(folder: Path) -> Iterator[str]:
    """A line for each process of a run's services."""
    for each in read(folder):
        if not each.log:
            yield f"{each.name} at {each.url}, which others run"
            continue
        often = f", started {each.starts} times" if each.starts > 1 else ""
        yield f"{each.name} at {each.url}: {each.state}{often}: {each.command} (prints into {each.log})"
