"""Optional packages: imported when first needed; where one is missing, the error has the line that installs it."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError, Problem

INSTALL = {  # backend → the line that installs its package of the same name
    "deepspeed": "pip install --no-build-isolation 'rlflow-dag[deepspeed]'",
    "vllm": "pip install 'rlflow-dag[vllm]'",
}
ON_CPU = {"vllm": "python -m rlflow.backends.vllm.install"}  # the same for machines without a GPU


def require(module: str, extra: str, install: str = "") -> Any:
    """Import a module of an optional package. Raises PlanError where the package is missing, with the line ``install``, or else the line
    that installs the extra."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:  # the package is there, and broken: its own message says more
            raise
        raise _missing_package(package, extra, install) from missing


def ask(package: str, extra: str) -> None:
    """Check that a package is installed, without importing it. Raises PlanError with the line that installs the extra where it is
    missing."""
    if not _installed(package):
        raise _missing_package(package, extra)


def _missing_package(package: str, extra: str, install: str = "") -> PlanError:
    return PlanError.of("missing-package", f"the package '{package}' is not installed", expected=f"{package}, of the extra '{extra}'",
                        remedy=install or f"pip install 'rlflow-dag[{extra}]'")


def missing(backend: str, device: str) -> Problem | None:
    """The problem of a shipped backend whose package is not installed, with the line that installs it for ``device`` (auto, cpu, cuda).
    None where nothing is missing. Imports nothing."""
    if backend not in INSTALL or _installed(backend):
        return None
    return Problem("missing-package", f"the package '{backend}' is not installed", expected=f"{backend}, for the backend '{backend}'",
                   remedy=install_line(backend, device))


def install_line(backend: str, device: str) -> str:
    """The line that installs a backend's package for ``device``. With ``auto`` it is the one for GPUs where their driver is installed."""
    gpu = device == "cuda" or (device == "auto" and Path("/proc/driver/nvidia/version").exists())
    return INSTALL[backend] if gpu else ON_CPU.get(backend, INSTALL[backend])


def _installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
