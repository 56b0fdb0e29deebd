"""A run's folder: its name, the files that describe the run, and the output of reward functions.

This module also notices if the folder is moved or deleted during the run.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.author.node_options import AnyOptions, Pairs, ShownOptions, UpdateOptions
from rlflow.checkpoints import durable
from rlflow.checkpoints.logs import Log
from rlflow.compiler.graph import draw, wire
from rlflow.compiler.graph.model import Graph
from rlflow.config.options import Options
from rlflow.errors import Place, PlanError, printable
from rlflow.monitoring.lines import LINE, Lines
from rlflow.monitoring.secrets import MaskedLines, masked, redacted

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
SETTINGS, GRAPH = "settings.json", "graph.msgpack"
ABANDONED = 3600.0  # seconds until another run removes an unfinished folder


def create(out: Path, name: str | None, flow: str, texts: Mapping[str, bytes] = MappingProxyType({})) -> Path:
    """Create a new folder in ``out`` and return its absolute path.

    ``name``: the folder's name, or None for ``flow`` with the next free number. ``texts``: files to put in
    the folder, as name → content. The folder appears with all of these files, or not at all. Raises PlanError
    if the name is taken or isn't a plain folder name.
    """
    check_free(out, name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        durable.clear(out, ABANDONED)
        return _place(out.absolute(), [name] if name is not None else _numbered(flow), texts)
    except OSError as error:
        raise PlanError.of(
            "run-folder",
            f"cannot write a run to '{out}'",
            found=str(error.strerror),
            expected="a writable folder",
            remedy="choose another --out",
        ) from error


def _place(out: Path, names: Iterable[str], texts: Mapping[str, bytes]) -> Path:
    """Create the folder under the first name that is free, and return its path.

    Raises PlanError if all names are taken, and OSError.
    """
    folder = durable.aside(out / "run")
    os.mkdir(folder)
    try:
        for file, data in texts.items():
            durable.write(folder / file, [data])
        durable.flush_folder(folder)
        for name in names:
            if not os.path.lexists(out / name) and _taken(folder, out / name):
                return out / name
        raise _exists(out / name)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _taken(folder: Path, name: Path) -> bool:
    """Rename ``folder`` to ``name``, or return False if that name is in use. Raises OSError."""
    try:
        durable.move(folder, name)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            return False
        raise
    return True


def _numbered(flow: str) -> Iterator[str]:
    return (f"{flow}-{number}" for number in itertools.count(1))


def check_free(out: Path, name: str | None) -> None:
    """Check that a new run can be named ``name`` in the folder ``out``.

    Raises PlanError if the name is taken or invalid, or if ``out`` is a file.
    """
    check_name(name)
    if os.path.lexists(out) and not out.is_dir():
        raise PlanError.of(
            "run-folder",
            f"cannot write a run to '{out}'",
            found="a file",
            expected="a folder, or the name of a new one",
            remedy="choose another --out",
        )
    if name is not None and os.path.lexists(out / name):
        raise _exists(out / name)


def check_name(name: str | None) -> None:
    """Raise PlanError if ``name`` isn't a valid name for a run. None is fine."""
    if name is not None and not NAME.fullmatch(name):
        raise PlanError.of(
            "run-name",
            "a run's name is a single folder name",
            found=repr(name),
            expected="at most 200 letters, digits, '.', '_' and '-'",
            remedy="choose another --name",
        )


def check_place(options: Options) -> None:
    """Check ``--name``, ``--out`` and ``--resume`` before anything is loaded.

    Raises PlanError if the run can neither create its folder nor resume the run in it.
    """
    out, name = Path(options.out), options.name
    if options.resume is not None and name is None:
        raise PlanError.of(
            "resume-name",
            "--resume auto needs the name of the run to resume",
            found="no --name",
            expected="the same --name each time this command is given",
            remedy="--name NAME",
        )
    if options.resume is None or not os.path.lexists(out / str(name)):
        check_free(out, name)


def _exists(folder: Path) -> PlanError:
    return PlanError.of(
        "run-exists",
        f"the run '{folder}' already exists",
        found="a folder or file of that name",
        expected="a new name",
        remedy=f"choose another --name, or leave it out; rlflow resume {folder} continues a run that was "
        "stopped",
    )


def texts(settings: Mapping[str, Any], graph: Graph) -> dict[str, bytes]:
    """Return the files that describe a run, as name → content, with secrets masked.

    These are the settings as JSON, and the graph as text, as JSON and as msgpack, which `resume` uses for
    comparing.
    """
    graph = without_secrets(graph)
    return {
        SETTINGS: f"{json.dumps(settings, indent=1, default=str)}\n".encode(),
        "graph.txt": f"{graph}\n".encode(),
        "graph.json": f"{draw.as_json(graph)}\n".encode(),
        GRAPH: wire.pack(graph),
    }


def without_secrets(graph: Graph) -> Graph:
    """Return the graph with secrets in its settings and file names masked. Doing this twice has no effect."""
    nodes = (
        replace(
            node,
            settings=_without_secrets(node.settings),
            body=node.body and without_secrets(node.body),
            place=_masked_place(node.place),
            definition=_masked_place(node.definition),
        )
        for node in graph.nodes
    )
    return replace(graph, hp=_masked(graph.hp), nodes=tuple(nodes))


def _masked_place(place: Place | None) -> Place | None:
    return place and replace(place, path=masked(place.path))


def _without_secrets(options: AnyOptions) -> AnyOptions:
    if isinstance(options, ShownOptions | UpdateOptions):
        return replace(options, own=_masked(options.own))
    masked = _masked(options.shown)
    return options if masked == options.shown else ShownOptions(masked)


def _masked(settings: Pairs) -> Pairs:
    pairs = ((name, next(iter(redacted({name: value}).values()))) for name, value in settings)
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in pairs)


class Lost(Exception):
    """Raised if the run's folder was moved (to ``moved``) or deleted (``moved`` is None)."""

    def __init__(self, folder: Path, moved: Path | None) -> None:
        self.folder, self.moved = folder, moved
        super().__init__(
            f"the run's folder {folder} was {f'moved to {moved}' if moved else 'deleted'} while it ran"
        )


class RunFolder:
    """The folder of a run in progress, which notices if it is moved or deleted."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.absolute()
        self.shown = shown(self.path)  # for messages, relative to where the run was started
        self._handle = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def look(self) -> None:
        """Raise Lost if the folder was moved or deleted. I/O errors are ignored."""
        try:
            there = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            raise Lost(self.path, self._moved()) from None
        except OSError:
            return
        if not os.path.samestat(there, os.fstat(self._handle)):
            raise Lost(self.path, self._moved())

    def _moved(self) -> Path | None:
        """Return where the folder was moved to, or None if this is unknown or the folder no longer exists."""
        try:
            path = Path(os.readlink(f"/proc/self/fd/{self._handle}"))
            return path if os.path.samestat(os.stat(path), os.fstat(self._handle)) else None
        except OSError:
            return None

    def close(self) -> None:
        """Close the folder's file descriptor."""
        os.close(self._handle)


def shown(folder: Path) -> str:
    """Return a path for messages: relative if it is in the working directory, otherwise absolute."""
    try:
        return os.path.relpath(folder) if folder.is_relative_to(os.getcwd()) else str(folder)
    except FileNotFoundError:  # the working directory is gone
        return str(folder)


FILE = "rewards.txt"
LIMIT = 1 << 20  # maximum size of the file in bytes


class Printed:
    """Writes what reward and environment processes print to rewards.txt, line by line, with secrets masked.

    Output may arrive in pieces and from several threads. Control characters are escaped.
    """

    def __init__(self, folder: Path, failed: Callable[[OSError], None]) -> None:
        self._path, self._failed = folder / FILE, failed
        self._log: Log | None = None
        self._room = LIMIT
        self._masked = MaskedLines()
        self._lines = Lines(self._add)
        self.on_output = self._lines.on_output

    def close(self) -> None:
        """Write any unfinished lines and close the file."""
        self._lines.close()
        if self._log is not None:
            self._log.close()

    def _add(self, line: bytes) -> None:
        if self._room <= 0:
            return
        if self._log is None:  # opened late: a run whose rewards print nothing has no such file
            self._log = Log(self._path, self._failed)
            self._room = LIMIT - (self._path.stat().st_size if self._path.exists() else 0)
        text = printable(self._masked(line.decode(errors="replace")))[:LINE] + "\n"
        self._room -= len(text.encode())
        self._log.add(
            text if self._room > 0 else f"the file is limited to {LIMIT >> 20} MiB: later lines are dropped\n"
        )
