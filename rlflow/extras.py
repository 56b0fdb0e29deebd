"""What is installed: rlflow's own version, and optional packages, which are imported when first needed; where
one is missing, the error has the line that installs it."""

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
INSTALL = {  # backend → the line that installs its package of the same name
    "deepspeed": "pip install --no-build-isolation 'rlflow-dag[deepspeed]'",
    "vllm": "pip install 'rlflow-dag[vllm]'",
}
ON_CPU = {"vllm": "python -m rlflow.backends.vllm.install"}  # the same for machines without a GPU
# module → what it imports for a few of its tasks alone: this draws in matplotlib
LATE = {"reasoning_gym.factory": ("cellpylib",)}


def require(module: str, extra: str, install: str = "") -> Any:
    """Import a module of an optional package. Raises PlanError where the package is missing, with the line
    ``install``, or else the line that installs the extra."""
    try:
        with late(LATE.get(module, ())):
            return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        # the package is there, and broken: its own message says more
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise _missing_package(package, extra, install) from missing


@contextmanager
def late(packages: Sequence[str]) -> Iterator[None]:
    """Packages that are imported within are run when one of their names is first read, and not before."""
    finder = _Late(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Late:
    """The finder of packages that are run late."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of such a package; None leaves a name to others."""
        spec = PathFinder.find_spec(name, path, target) if name in self.packages else None
        if spec is not None and spec.loader is not None:
            spec.loader = cast(Loader, _LateLoader(spec.loader))
        return spec


class _LateLoader:
    """Makes a module that is run when a name is read that it has not. Python's own LazyLoader runs it at its
    second import."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave the module to be run by whoever reads a name of it."""
        module.__dict__["_loader"] = self.loader


class _LateModule(ModuleType):
    """A module that has not been run yet."""

    _running = RLock()

    def __getattr__(self, name: str) -> Any:
        with _LateModule._running:  # a thread that comes second waits for the first
            if (loader := self.__dict__.pop("_loader", None)) is not None:
                loader.exec_module(self)
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module '{self.__name__}' has no attribute '{name}'") from None


def ask(package: str, extra: str) -> None:
    """Check that a package is installed, without importing it. Raises PlanError with the line that installs
    the extra where it is missing."""
    if not _installed(package):
        raise _missing_package(package, extra)


def _missing_package(package: str, extra: str, install: str = "") -> PlanError:
    return PlanError.of(
        "missing-package",
        f"the package '{package}' is not installed",
        expected=f"{package}, of the extra '{extra}'",
        remedy=install or f"pip install 'rlflow-dag[{extra}]'",
    )


def missing(backend: str, device: str) -> Problem | None:
    """The problem of a shipped backend whose package is not installed, with the line that installs it for
    ``device`` (auto, cpu, cuda). None where nothing is missing. Imports nothing."""
    if backend not in INSTALL or _installed(backend):
        return None
    return Problem(
        "missing-package",
        f"the package '{backend}' is not installed",
        expected=f"{backend}, for the backend '{backend}'",
        remedy=install_line(backend, device),
    )


def install_line(backend: str, device: str) -> str:
    """The line that installs a backend's package for ``device``. With ``auto`` it is the one for GPUs where
    their driver is installed."""
    gpu = device == "cuda" or (device == "auto" and Path("/proc/driver/nvidia/version").exists())
    return INSTALL[backend] if gpu else ON_CPU.get(backend, INSTALL[backend])


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
