"""Import optional packages when they are first needed, and report rlflow's own version.

If a package is missing, the error gives the command that installs it.
"""

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
INSTALL = {  # backend → the command that installs the package of the same name
    "deepspeed": "pip install --no-build-isolation 'rlflow-dag[deepspeed]'",
    "vllm": "pip install 'rlflow-dag[vllm]'",
}
ON_CPU = {"vllm": "python -m rlflow.backends.vllm.install"}  # the command for machines without a GPU
# module → packages that only a few of its tasks need: cellpylib imports matplotlib
LATE = {"reasoning_gym.factory": ("cellpylib",)}


def require(module: str, extra: str, install: str = "") -> Any:
    """Import and return a module of an optional package.

    If the package is missing, raises PlanError with the command ``install``, by default the command that
    installs the extra ``extra``.
    """
    try:
        with late(LATE.get(module, ())):
            return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        # the package itself is installed, but it failed to import another one: Python's own message is better
        if (missing.name or "").partition(".")[0] != package:
            raise
        raise _missing_package(package, extra, install) from missing


@contextmanager
def late(packages: Sequence[str]) -> Iterator[None]:
    """Inside the context, import ``packages`` without running their code yet.

    A package's code runs when one of its names is first read.
    """
    finder = _Late(packages)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Late:
    """An import finder that doesn't run the code of packages until one of their names is read."""

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a delayed package, or None for any other name."""
        spec = PathFinder.find_spec(name, path, target) if name in self.packages else None
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Loader", _LateLoader(spec.loader))
        return spec


class _LateLoader:
    """A loader whose modules run their code when a missing name is first read.

    Python's LazyLoader would already run it when the module is imported a second time.
    """

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Create an empty module."""
        return _LateModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Remember the real loader, which runs the module's code when one of its names is first read."""
        module.__dict__["_loader"] = self.loader


class _LateModule(ModuleType):
    """A module whose code has not run yet."""

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
    """Raise PlanError with the command that installs ``extra`` if ``package`` is not installed.

    This doesn't import the package.
    """
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
    """Return a problem if one of rlflow's backends needs a package that is not installed, else None.

    The problem gives the command that installs it for ``device`` (auto, cpu or cuda). Nothing is imported.
    """
    if backend not in INSTALL or _installed(backend):
        return None
    return Problem(
        "missing-package",
        f"the package '{backend}' is not installed",
        expected=f"{backend}, for the backend '{backend}'",
        remedy=install_line(backend, device),
    )


def install_line(backend: str, device: str) -> str:
    """Return the command that installs a backend's package for ``device``.

    For ``auto``, this is the command for GPUs if there is a GPU driver.
    """
    gpu = device == "cuda" or (device == "auto" and Path("/proc/driver/nvidia/version").exists())
    return INSTALL[backend] if gpu else ON_CPU.get(backend, INSTALL[backend])


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
