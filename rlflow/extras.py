"""Optional packages: imported when first needed, and missed with the line that installs them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError, Problem

INSTALL = {  # what installs the package of a backend, which has its name
    "deepspeed": "pip install --no-build-isolation 'rlflow-dag[deepspeed]'",
    "vllm": "pip install 'rlflow-dag[vllm]'",
}
ON_CPU = {"vllm": "python -m rlflow.backends.vllm.install"}


def require(module: str, extra: str, install: str = "") -> Any:
    """The module of an optional package. Raises PlanError with the install line, that of the extra or ``install``, where the package is
    missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = module.partition(".")[0]
        if (missing.name or "").partition(".")[0] != package:  # the package is there, and broken: its own message says more
            raise
        raise _lacking(package, extra, install) from missing


def ask(package: str, extra: str) -> None:
    """Without importing it. Raises PlanError with the extra's install line where the package is missing."""
    if not _found(package):
        raise _lacking(package, extra)


def _lacking(package: str, extra: str, install: str = "") -> PlanError:
    return PlanError.of("missing-package", f"the package '{package}' is not installed", expected=f"{package}, of the extra '{extra}'",
                        remedy=install or f"pip install 'rlflow-dag[{extra}]'")


def missing(backend: str, device: str) -> Problem | None:
    """The package that a shipped backend needs and that is not there, with the line that installs it for ``device`` (auto, cpu, cuda); None
    where nothing is missing. Asked without importing anything."""
    if backend not in INSTALL or _found(backend):
        return None
    return Problem("missing-package", f"the package '{backend}' is not installed", expected=f"{backend}, for the backend '{backend}'",
                   remedy=install_line(backend, device))


def install_line(backend: str, device: str) -> str:
    """For ``auto`` that of GPUs where their driver is there."""
    gpu = device == "cuda" or (device == "auto" and Path("/proc/driver/nvidia/version").exists())
    return INSTALL[backend] if gpu else ON_CPU.get(backend, INSTALL[backend])


def _found(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
