"""A run's folder: its name, and the files in it that say what the run is."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rlflow.author.node_options import AnyOptions, Pairs, ShownOptions, UpdateOptions
from rlflow.checkpoints import durable
from rlflow.compiler.graph import draw, wire
from rlflow.compiler.graph.model import Graph
from rlflow.config.options import Options
from rlflow.errors import Place, PlanError
from rlflow.monitoring.secrets import masked, redacted

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
SETTINGS, GRAPH = "settings.json", "graph.msgpack"
ABANDONED = 3600.0  # seconds after which a folder that a dead process was making is removed by another run


def create(out: Path, name: str | None, flow: str, texts: Mapping[str, bytes] = MappingProxyType({})) -> Path:
    """A new folder in ``out``: ``name``, or the flow's name and the next free number, as an absolute path. It is there with all of
    ``texts`` or not at all. Raises PlanError for a name that is taken or would lie elsewhere."""
    check_free(out, name)
    try:
        out.mkdir(parents=True, exist_ok=True)
        durable.clear(out, ABANDONED)
        return _place(out.absolute(), [name] if name is not None else _numbered(flow), texts)
    except OSError as error:
        raise PlanError.of("run-folder", f"no run can be written to '{out}'", found=str(error.strerror),
                           expected="a folder that can be written", remedy="choose another --out") from error


def _place(out: Path, names: Iterable[str], texts: Mapping[str, bytes]) -> Path:
    """The first of the names that is free. Raises OSError, and PlanError where none is."""
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
    """Whether the folder got this name, which no other process may get meanwhile. Raises OSError."""
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
    """Before anything is loaded. Raises PlanError for a name that is taken or would lie elsewhere, and for an ``out`` that is a file."""
    check_name(name)
    if os.path.lexists(out) and not out.is_dir():
        raise PlanError.of("run-folder", f"no run can be written to '{out}'", found="a file", expected="a folder, or a new one's name",
                           remedy="choose another --out")
    if name is not None and os.path.lexists(out / name):
        raise _exists(out / name)


def check_name(name: str | None) -> None:
    """Raises PlanError for a name that no run can have."""
    if name is not None and not NAME.fullmatch(name):
        raise PlanError.of("run-name", "a run's name is a single folder name", found=repr(name),
                           expected="at most 200 letters, digits, '.', '_' and '-'", remedy="choose another --name")


def check_place(options: Options) -> None:
    """Before anything is loaded. Raises PlanError where no run can get the name of the options, or go on under it."""
    out, name = Path(options.out), options.name
    if options.resume is not None and name is None:
        raise PlanError.of("resume-name", "--resume auto goes on with the run of a name", found="no --name",
                           expected="the name that the run has whenever this command is given", remedy="--name NAME")
    if options.resume is None or not os.path.lexists(out / str(name)):
        check_free(out, name)


def _exists(folder: Path) -> PlanError:
    return PlanError.of("run-exists", f"the run '{folder}' exists", found="a folder or file of that name", expected="a new name",
                        remedy=f"choose another --name, or leave it out; rlflow resume {folder} goes on with a run that was stopped")


def texts(settings: Mapping[str, Any], graph: Graph) -> dict[str, bytes]:
    """The files that say what a run is, by name: settings as JSON; the graph as text, as JSON and to compare on resume. No secrets
    are in any of them."""
    graph = without_secrets(graph)
    return {SETTINGS: f"{json.dumps(settings, indent=1, default=str)}\n".encode(), "graph.txt": f"{graph}\n".encode(),
            "graph.json": f"{draw.as_json(graph)}\n".encode(), GRAPH: wire.pack(graph)}


def without_secrets(graph: Graph) -> Graph:
    """The graph with the secrets among its settings and in its files' names masked. Done to one where it is done already, it changes
    nothing."""
    nodes = (replace(node, settings=_without_secrets(node.settings), body=node.body and without_secrets(node.body),
                     place=_masked_place(node.place), definition=_masked_place(node.definition)) for node in graph.nodes)  # fmt: skip
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
