"""Record a run's services in its folder: services.json, and a log file for each process."""

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
    """A process of a service, or a service that the run didn't start."""

    name: str  # name of the service
    command: str  # the command with its port inserted; the URL if the run did not start the service
    url: str  # the URL of the service
    state: (
        str  # starting, serving, silent, dead (not restarted), ended, or elsewhere (not started by the run)
    )
    starts: int = 0  # how often the process was started
    pid: int = 0  # process id, which may belong to another process by now; 0 if there is no process
    log: str = ""  # the file with its output, relative to the run's folder


def write(folder: Path, processes: Iterable[ServedProcess]) -> None:
    """Write services.json in a run's folder, atomically and with secrets masked. Raises OSError."""
    text = json.dumps([asdict(each) for each in processes], indent=1)
    durable.replace(folder / FILE, f"{masked(text)}\n".encode(), flush=False)


def read(folder: Path) -> list[ServedProcess]:
    """Return the processes in a run's services.json, or [] if the file can't be read."""
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
    """Yield a line about each process of a run's services."""
    for each in read(folder):
        if not each.log:
            yield f"{each.name} at {each.url}, not started by this run"
            continue
        often = f", started {each.starts} times" if each.starts > 1 else ""
        yield f"{each.name} at {each.url}: {each.state}{often}: {each.command} (log: {each.log})"
