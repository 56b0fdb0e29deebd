"""Decide which of the files named in a run's settings `rlflow resume` may execute without asking.

Since a run's folder may belong to another user, these files can't always be trusted. This module also finds
the files and packages that a Python file imports.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import importlib.machinery
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlflow.author.load import algorithms_folder, target
from rlflow.config.backend_names import SHIPPED
from rlflow.errors import PlanError
from rlflow.monitoring.reporter import Reporter
from rlflow.monitoring.secrets import MASK
from rlflow.processes.declare import HEAD, URLS
from rlflow.processes.watchdog import private
from rlflow.rewards.reward_spec import parse_reward
from rlflow.runs import identity


@dataclass
class Imports:
    """The files and modules that a Python file imports, directly or indirectly."""

    files: set[Path] = field(default_factory=set)  # imported files from its own folder
    # top-level modules from elsewhere, except Python's standard library
    outside: set[str] = field(default_factory=set)


def imports(file: Path, module: str = "") -> Imports:
    """Return what a file imports, including what's imported by the files that it imports from its own folder.

    ``module``: if the file is part of a package, the dotted name of its module. The whole package then counts
    as its own folder.
    """
    closure, waiting = Imports(), [file]
    root, own = root_of(file, module), module.partition(".")[0]
    known = {file}
    while waiting:
        path = waiting.pop()
        for name, level in _named(path):
            top = name.partition(".")[0]
            ours = level or (top == own if own else top != "rlflow")  # rlflow is covered by its version
            inside = list(_inside(name, _base(path, root, level))) if ours else []
            if not inside and not level:
                closure.outside.add(name.partition(".")[0])
            new = set(inside) - known
            known |= new
            closure.files |= new
            waiting += new
    closure.outside -= set(sys.stdlib_module_names)
    return closure


def root_of(file: Path, module: str = "") -> Path:
    """Return the folder that a file's imports start from: its own, or the one that contains its package."""
    return file.parents[module.count(".") + (file.name == "__init__.py") if module else 0]


def _base(path: Path, root: Path, level: int) -> Path:
    """Return the folder in which to look up an imported name. ``level``: the number of leading dots."""
    return path.parents[level - 1] if level else root


def _named(path: Path) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, number of leading dots) for each import in a file, even inside functions.

    ``from a import b`` yields ``a.b``.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = f"{node.module}." if node.module else ""
            yield from ((start + alias.name, node.level) for alias in node.names)


def _inside(name: str, folder: Path) -> Iterator[Path]:
    """Yield the files that a dotted name refers to in a folder: each package's ``__init__``, and the module.

    The last part of the name may also be an attribute instead of a module.
    """
    for part in name.split("."):
        if (folder / f"{part}.py").is_file():
            yield folder / f"{part}.py"
            return
        folder /= part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"


def meaning(file: Path) -> str:
    """Return the sha256 of a Python file, ignoring comments and layout. Raises OSError."""
    data = file.read_bytes()
    # a file that can't be parsed is digested as it is
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        data = ast.unparse(ast.parse(data)).encode(errors="backslashreplace")
    return hashlib.sha256(data).hexdigest()


FILE_DIGEST = "file_sha256"  # key of settings.json: digest of the flow's file at the start of the run
REWARDS, ENVIRONMENTS = ("reward",), ("env",)  # settings, of the run or of a role, that may name Python files
SERVE = ["rlflow", "serve"]
BACKENDS = ("backend", "trainer", "generator")  # settings that may name Python modules


@dataclass(frozen=True)
class Doubt:
    """A file or a service's command that would be executed, and the reason not to trust it.

    ``str()`` describes it in one line.
    """

    what: Path | str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def check_trusted(
    folder: Path, saved: Mapping[str, Any], values: Mapping[str, Any], trust: bool, reporter: Reporter
) -> None:
    """Check all files that a resumed run would execute, before any of them is executed.

    ``saved``: the content of settings.json. ``values``: the recorded settings still in use, with paths that
    work in the current folder. Raises PlanError with all doubtful files and commands. With ``trust``, they
    are only reported.
    """
    doubts = list(doubted(folder, saved, values))
    if doubts and not trust:
        raise PlanError.of(
            "resume-trust",
            f"resuming the run '{folder.name}' executes files that it names, and they may not be yours",
            found="\n            ".join(map(str, doubts)),
            expected="packaged algorithms; or a run and files that you own and only you can write to",
            remedy="read these files; if they may run as you, repeat the command with --trust",
        )
    for doubt in doubts:
        reporter.note(f"executed because of --trust: {doubt}")


def doubted(folder: Path, saved: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Doubt]:
    """Yield the files and commands that can't be trusted, with the reasons."""
    recorded = _digests(folder, saved)
    for file in dict.fromkeys(named_files(saved, values)):
        if why := _doubt(file, folder.resolve(), saved.get("started_in"), recorded):
            yield Doubt(file, why)
    for command in commands(values):
        yield Doubt(
            command,
            "a service's command, which rlflow cannot check: read it, or give the same command again",
        )


def commands(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the commands of services in the settings.

    `rlflow serve` is left out, because ``named_files`` yields everything that it executes.
    """
    for name, value in values.items():
        head, _, rest = name.partition(".")
        commands = (
            head == HEAD
            and rest.partition(".")[2] in ("", "run")
            and isinstance(value, str)
            and not value.startswith(URLS)
        )
        if commands and shlex.split(value)[:2] != SERVE:
            yield value


def named_files(saved: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the Python files that the settings name.

    Files that are part of rlflow are left out, and so are modules that Python finds without this run. Raises
    PlanError if a flow or a reward doesn't exist.
    """
    flow = target(f"{saved['file']}::{saved['flow']}").path.resolve()
    if flow.parent != algorithms_folder().resolve():
        yield flow
    for name, value in values.items():
        last = name.rpartition(".")[2]
        for each in value if isinstance(value, list | tuple) else [value]:
            if not isinstance(each, str) or MASK in each or name.startswith(("hp.", "data.")):
                continue
            if last in REWARDS and ".py" in each and (reward := parse_reward(each)).kind == "function":
                yield Path(reward.path).resolve()
            if last in ENVIRONMENTS and ".py:" in each:
                yield Path(os.path.expanduser(each).rpartition(":")[0]).resolve()
            if name.startswith(f"{HEAD}.") and each.startswith("rlflow serve "):
                named = (word.partition(".py:")[0] + ".py" for word in shlex.split(each) if ".py:" in word)
                yield from (Path(os.path.expanduser(file)).resolve() for file in named)
            if last in BACKENDS and each not in SHIPPED:
                yield from _module_files(each, flow.parent)


def _module_files(name: str, folder: Path) -> Iterator[Path]:
    """Yield the files that Python would import a module from.

    Yields nothing if Python finds the module without this run. A package is represented by its ``__init__``.
    """
    here = ("", os.getcwd(), str(folder))
    top = name.partition(".")[0]
    for places, own in (
        ([each for each in sys.path if each not in here], False),
        ([str(folder), os.getcwd()], True),
    ):
        spec = importlib.machinery.PathFinder.find_spec(top, places)
        if spec is not None:
            if own:
                yield from (
                    Path(each).resolve()
                    for each in [spec.origin or "", *(spec.submodule_search_locations or ())]
                    if each
                )
            return


def _digests(folder: Path, saved: Mapping[str, Any]) -> set[str]:
    """Return the digests of Python files that were recorded when the run was started."""
    try:
        recorded = identity.read(folder)
    except ValueError:
        recorded = None
    parts = recorded.kept if recorded else {}
    own = ("reward ", "environment ", "backend ")
    return {str(saved.get(FILE_DIGEST)), *(value for name, value in parts.items() if name.startswith(own))}


def _doubt(file: Path, run: Path, start: object, recorded: Iterable[str]) -> str:
    """Return why a file can't be trusted, or "" if it may be executed."""
    if file.is_relative_to(run):
        return "it is in the run's own folder, where a run never writes code"
    try:
        for path in (run, run / "settings.json", file):
            if why := _others(path):
                return why if path == file else f"the run is not yours alone: {path}: {why}"
        private.check_place(file.parent)
        known = f"sha256 {meaning(file)}" in recorded if file.is_file() else False
    except OSError as error:
        return str(error)
    places = [Path.cwd(), *([Path(start)] if isinstance(start, str) else [])]
    if (
        known
        or run.is_relative_to(file.parent)
        or any(file.is_relative_to(place.resolve()) for place in places)
    ):
        return ""
    return (
        "it is not the file that the run was started with, and it is neither below the folder where the "
        "run was started nor below this folder"
    )


def _others(path: Path) -> str:
    """Return why a path isn't trusted, or "" if this user or root owns it and nobody else can write to it."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    writers = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getegid() else 0)
    return (
        f"other users can write to it (mode {stat.S_IMODE(status.st_mode):o})"
        if status.st_mode & writers
        else ""
    )


def digest_of(file: Path) -> str | None:
    """Return the digest of the flow's file for settings.json, or None if there is no file, as in a notebook."""
    try:
        return f"sha256 {meaning(file)}"
    except OSError:
        return None
