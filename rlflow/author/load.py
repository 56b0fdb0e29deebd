"""Load an algorithm's file and find its flow. Each file is loaded once per process."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import traceback
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from rlflow.author.flow import Flow
from rlflow.author.scope import engines
from rlflow.author.words import algorithm_meant
from rlflow.errors import FlowError, Place, PlanError, Problem, listed, nearest


@dataclass(frozen=True)
class Target:
    """A file named by the user, and the flow in it if the user named one."""

    path: Path
    flow: str | None = None


def algorithms_folder() -> Path:
    """Return the folder of the algorithms that come with rlflow."""
    return Path(next(iter(importlib.import_module("rlflow.algorithms").__path__)))


def target(text: str) -> Target:
    """Find the file that ``text`` names, and the flow in it if given.

    ``text`` is ``FILE``, ``FILE::flow`` or the name of an algorithm that comes with rlflow. Raises PlanError
    if the file doesn't exist.
    """
    name, _, flow = text.partition("::")
    path = Path(name)
    if not path.exists() and path.suffix == "" and (algorithms_folder() / f"{name}.py").is_file():
        path = algorithms_folder() / f"{name}.py"
    if not path.is_file():
        known = [p.stem for p in sorted(algorithms_folder().glob("*.py")) if p.stem != "__init__"]
        siblings = [str(p) for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PlanError.of(
            "no-file",
            f"there is no algorithm file '{name}'",
            found="a folder" if path.is_dir() else "nothing there",
            expected=f"a Python file, or one of {listed(known)}",
            nearest=algorithm_meant(name, [*siblings, *known]),
            remedy="name a file; `rlflow new NAME` writes one to start from",
        )
    return Target(path.resolve(), flow or None)


def load_flow(text: str) -> Flow:
    """Load the file that ``text`` names and return its flow.

    ``text`` is as in ``target``. Raises FlowError or PlanError if the file can't be loaded, if it doesn't
    have the named flow, or if none is named and there are several.
    """
    where = target(text)
    flows = flows_of(load(where.path))
    if where.flow is not None:
        if where.flow not in flows:
            raise PlanError.of(
                "no-flow",
                f"there is no flow '{where.flow}' in this file",
                place=Place(str(where.path), 1),
                found=listed(flows),
                expected=where.flow,
                nearest=nearest(where.flow, flows),
                remedy="name a flow that the file defines",
            )
        return flows[where.flow]
    if len(flows) != 1:
        raise FlowError(_not_one(where.path, flows))
    return next(iter(flows.values()))


def flows_of(module: ModuleType) -> dict[str, Flow]:
    """Return the flows that a module defines, as name → flow. Imported flows don't count."""
    # a flow with two names counts once
    names = {value: name for name, value in reversed(vars(module).items()) if isinstance(value, Flow)}
    return {
        name: flow for flow, name in reversed(names.items()) if flow.function.__module__ == module.__name__
    }


def _not_one(path: Path, flows: dict[str, Flow]) -> Problem:
    if not flows:
        return Problem(
            "no-flow",
            "the file defines no flow",
            Place(str(path), 1),
            found="no function with @flow",
            expected="a function with @flow",
            remedy="decorate the function of one iteration with @flow",
        )
    second = list(flows.values())[1]
    return Problem(
        "two-flows",
        f"the file defines {len(flows)} flows",
        second.place,
        next(iter(flows.values())).place,
        found=listed(flows),
        expected="one flow, or one named flow",
        remedy=f"name one: {path.name}::{next(iter(flows))}",
    )


@lru_cache(maxsize=64)
def load(path: Path) -> ModuleType:
    """Load a Python file. If this process has already loaded it, return the same module.

    The file can import from its own folder. Raises FlowError if its code raises.
    """
    installed = path.parent == algorithms_folder().resolve()
    _make_importable(path.parent)
    try:
        if installed:
            return importlib.import_module(f"rlflow.algorithms.{path.stem}")
        name = _module_name(path)
        return _executed(name, path, _SourceLoader(name, str(path)))
    except (Exception, SystemExit) as error:
        raise _load_error(path, error) from error


class _SourceLoader(importlib.machinery.SourceFileLoader):
    """Compiles the file's current text every time.

    Python would recognise its cached bytecode by file size and whole seconds, and could run an outdated
    version if the file was saved twice within a second.
    """

    def path_stats(self, path: str) -> NoReturn:
        raise OSError  # so that Python neither reads nor writes a compiled file


class _TextLoader(_SourceLoader):
    """Loads text as a module, as if it were the content of a file."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self._text = text

    def get_data(self, path: str) -> bytes:
        return self._text.encode()


@lru_cache(maxsize=64)
def load_text(path: Path, text: str) -> ModuleType:
    """Load ``text`` as a module, as if it were the content of ``path``. Nothing is written to disk.

    Error messages name ``path``, and the text can import from its folder. Raises FlowError if the code
    raises.
    """
    name = _module_name(path)
    _make_importable(path.parent)
    try:
        return _executed(name, path, _TextLoader(name, str(path), text))
    except (Exception, SystemExit) as error:
        raise _load_error(path, error) from error


def _make_importable(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


def _module_name(path: Path) -> str:
    return f"rlflow_file_{path.stem}_{zlib.crc32(str(path).encode()):x}"


def _executed(name: str, path: Path, loader: importlib.machinery.SourceFileLoader) -> ModuleType:
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _load_error(path: Path, error: BaseException) -> FlowError:
    if isinstance(error, FlowError):
        return error
    if isinstance(error, SyntaxError) and error.filename:
        place = Place(error.filename, error.lineno or 1)
    else:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        place = Place(str(path), frames[-1].lineno or 1 if frames else 1)
    close, remedy = None, "correct this line"
    if isinstance(error, ImportError) and error.name == "rlflow":
        close = nearest(str(error).partition("name '")[2].partition("'")[0], exported())
    elif isinstance(error, NameError) and error.name in exported():
        remedy = f"from rlflow import {error.name}"
    elif not isinstance(error, SyntaxError) and (hiding := _hiding_packages(path.parent)):
        place = Place(str(hiding[0]), 1)
        remedy = (
            f"rename {listed(file.name for file in hiding)}: Python imports it instead of the module "
            "with the same name"
        )
    return FlowError(
        Problem(
            "file-raised",
            f"the file cannot be loaded: {type(error).__name__}: {error}",
            place,
            nearest=close,
            found=type(error).__name__,
            expected="a file that loads",
            remedy=remedy,
        )
    )


def exported() -> tuple[str, ...]:
    """Return the names that algorithms can import from rlflow."""
    return engines().exports


def _hiding_packages(folder: Path) -> list[Path]:
    """List the files in ``folder`` that shadow a standard module or an installed package of the same name."""
    packages = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]

    def installed(name: str) -> bool:
        return (
            name in sys.stdlib_module_names
            or importlib.machinery.PathFinder.find_spec(name, packages) is not None
        )

    return [file for file in sorted(folder.glob("*.py")) if file.stem != "__init__" and installed(file.stem)]
