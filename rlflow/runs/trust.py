"""Which files that a run's settings name may be executed by `rlflow resume` without asking: the run's folder may
belong to someone else.

Here too: which files a Python file imports, its own and those of packages.
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
    """The files and modules that a file imports."""

    files: set[Path] = field(default_factory=set)  # in its own folder
    # top-level modules that lie elsewhere and are not Python's own
    outside: set[str] = field(default_factory=set)


def imports(file: Path, module: str = "") -> Imports:
    """The imports of a file and of everything that it imports from its own folder; of a ``module`` of a
    package, from that package."""
    closure, waiting = Imports(), [file]
    root, own = root_of(file, module), module.partition(".")[0]
    known = {file}
    while waiting:
        path = waiting.pop()
        for name, level in _named(path):
            top = name.partition(".")[0]
            ours = level or (top == own if own else top != "rlflow")  # whose version is known
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
    """The folder that is importable for a file: its own, or where its package begins."""
    return file.parents[module.count(".") + (file.name == "__init__.py") if module else 0]


def _base(path: Path, root: Path, level: int) -> Path:
    """The folder in which a name is looked for: dots before it go up from the file's own package."""
    return path.parents[level - 1] if level else root


def _named(path: Path) -> Iterator[tuple[str, int]]:
    """(dotted name, dots before it) of each import of a file, also in its functions; of ``from a import b``
    both a and a.b."""
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
    """The files of a dotted name below a folder: its packages' ``__init__`` and the module. The last part may
    be no module."""
    for part in name.split("."):
        if (folder / f"{part}.py").is_file():
            yield folder / f"{part}.py"
            return
        folder /= part
        if (folder / "__init__.py").is_file():
            yield folder / "__init__.py"


def meaning(file: Path) -> str:
    """A digest of what a Python file says, whatever its comments and its layout. Raises OSError."""
    data = file.read_bytes()
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # such a file is taken as it is
        data = ast.unparse(ast.parse(data)).encode(errors="backslashreplace")
    return hashlib.sha256(data).hexdigest()


FILE_DIGEST = "file_sha256"  # of settings.json: what the flow's file said when the run was started
REWARDS, ENVIRONMENTS = ("reward",), ("env",)  # settings, of the run or of a role, that may name Python files
SERVE = ["rlflow", "serve"]
BACKENDS = ("backend", "trainer", "generator")  # likewise


@dataclass(frozen=True)
class Doubt:
    """A file or a service's command that would be executed, and why nothing vouches for it. Prints as a
    line."""

    what: Path | str
    why: str

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def check_trusted(
    folder: Path, saved: Mapping[str, Any], values: Mapping[str, Any], trust: bool, reporter: Reporter
) -> None:
    """Before anything is executed. saved: settings.json; values: those settings of it that nothing replaces,
    their paths as they lead from here. Raises PlanError with all files in doubt, unless ``trust``: then they
    are said."""
    doubts = list(doubted(folder, saved, values))
    if doubts and not trust:
        raise PlanError.of(
            "resume-trust",
            f"to go on with the run '{folder.name}' is to execute files that it names, and nothing says "
            "that they are yours",
            found="\n            ".join(map(str, doubts)),
            expected="packaged algorithms; or files that you own, as does the run, and nobody else can "
            "write to",
            remedy="read these files; if they may run as you: the same with --trust",
        )
    for doubt in doubts:
        reporter.note(f"executed, since --trust is given: {doubt}")


def doubted(folder: Path, saved: Mapping[str, Any], values: Mapping[str, Any]) -> Iterator[Doubt]:
    """The files that nothing vouches for."""
    recorded = _digests(folder, saved)
    for file in dict.fromkeys(named_files(saved, values)):
        if why := _doubt(file, folder.resolve(), saved.get("started_in"), recorded):
            yield Doubt(file, why)
    for command in commands(values):
        yield Doubt(
            command,
            "a service's command, which only you can vouch for: read it, or give the same command again",
        )


def commands(values: Mapping[str, Any]) -> Iterator[str]:
    """The commands of services among the settings, but for those of `rlflow serve`, which executes what
    ``named_files`` gives alone."""
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
    """Python files that the settings name, but for packaged ones and those of modules that Python finds by
    itself. Raises PlanError for a flow or a reward that is not there."""
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
    """The files from which a module would be imported; none where it is found without this run. A package is
    named by its ``__init__``."""
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
    """The recorded digests of the Python files that the run was started with."""
    try:
        recorded = identity.read(folder)
    except ValueError:
        recorded = None
    parts = recorded.kept if recorded else {}
    own = ("reward ", "environment ", "backend ")
    return {str(saved.get(FILE_DIGEST)), *(value for name, value in parts.items() if name.startswith(own))}


def _doubt(file: Path, run: Path, start: object, recorded: Iterable[str]) -> str:
    """A reason not to trust a file; empty where it may run."""
    if file.is_relative_to(run):
        return "it lies in the run's own folder, into which a run puts no code"
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
        "it is not the file that the run was started with, nor below the folder where that was, nor "
        "below this one"
    )


def _others(path: Path) -> str:
    """Whether users other than this one and root own a file or write to it."""
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"it belongs to user {status.st_uid}"
    writers = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getegid() else 0)
    return (
        f"others can write to it (rights {stat.S_IMODE(status.st_mode):o})"
        if status.st_mode & writers
        else ""
    )


def digest_of(file: Path) -> str | None:
    """The digest of the flow's file that settings.json keeps; None where there is no file, as in a
    notebook."""
    try:
        return f"sha256 {meaning(file)}"
    except OSError:
        return None
