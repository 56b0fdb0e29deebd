"""Optional packages: they are imported when they are first needed, and an error about a missing one gives the
command that installs it. Also rlflow's own version."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from threading import RLock
from types import ModuleType
from typing import Any, cast

from rlflow.errors import PlanError, Problem

VERSION = "0.1.0"  # of rlflow
INSTALL = {  # backend → the command that installs its package, which has the same name
    "deepspeed": "pip install --no-build-isolation 'rlflow-dag[deepspeed]'",
    "vllm": "pip install 'rlflow-dag[vllm]'",
}
ON_CPU = {"vllm": "python -m rlflow.backends.vllm.install"}  # the command for machines without a GPU
# module → packages that only few of its tasks need: cellpylib imports matplotlib
LATE = {"reasoning_gym.factory": ("cellpylib",)}


def require(module: str, extra: str, install: str = "") -> Any:
    """Import a module of an optional package. Raises PlanError if the package is missing, with the command
    ``install``, or else the command that installs the extra."""
    try:
        with late(LATE.get(module, ())):
            return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        # the package itself is installed, and another import failed: its own message is better
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise _missing_package(package, extra, install) from missing


@contextmanager
def late(packages: Sequence[str]) -> Iterator[None]:
    """Delay packages that are imported within the context: the code of each runs when one of its names is
    first read."""
    finder = _Late(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Late:
    """An import finder that delays the execution of packages until one of their names is read."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a late package; None for other names."""
        spec = PathFinder.find_spec(name, path, target) if name in self.packages else None
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Loader, _LateLoader(spec.loader))
        return spec


class _LateLoader:
    """Creates a module whose code runs when a name is read that it does not have yet. Python's LazyLoader
    would run the code at the second import."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an empty module."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do not run the module yet; reading one of its names runs it."""
        module.__dict__["_loader"] = self.loader


class _LateModule(ModuleType):
    """A module that has not been run yet."""

    _running = RLock()

    def __getattr__(self, name: str) -> Any:
        with _LateModule._running:  # a second thread waits for the first
            if (loader := self.__dict__.pop("_loader", None)) is not None:
                loader.exec_module(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'") from None


def ask(package: str, extra: str) -> None:
    """Check that a package is installed, without importing it. Raises PlanError with the command that
    installs the extra if it is missing."""
    if not _installed(package):
        raise _missing_package(package, extra)


def _missing_package(package: str, extra: str, install: str = "") -> PlanError:
    return PlanError.of(
        "missing-package",
        f"the package '{package}' is not installed",
        expected=f"{package}, from the extra '{extra}'",
        remedy=install or f"pip install 'rlflow-dag[{extra}]'",
    )


def missing(backend: str, device: str) -> Problem | None:
    """The problem if a shipped backend's package is not installed, with the command that installs it for
    ``device`` (auto, cpu, cuda). None if nothing is missing. Imports nothing."""
    if backend not in INSTALL or _installed(backend):
        return None
    return Problem(
        "missing-package",
        f"the package '{backend}' is not installed",
        expected=f"{backend}, for the backend '{backend}'",
        remedy=install_line(backend, device),
    )


def install_line(backend: str, device: str) -> str:
    """The command that installs a backend's package for ``device``. With ``auto``, the command for GPUs if a
    GPU driver is installed."""
    gpu = device == "cuda" or (device == "auto" and Path("/proc/driver/nvidia/version").exists())
    return INSTALL[backend] if gpu else ON_CPU.get(backend, INSTALL[backend])


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
