"""Names of backends and of their settings, known without loading any of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlflow.errors import PlanError, Problem, listed, nearest
from rlflow.given.flags import ROLE_KEYWORDS, unknown_flag

SHIPPED = ("deepspeed", "fsdp", "local", "null", "vllm")


def module_name(backend: str) -> str:
    """The module of a backend: of a shipped one by its name, else the dotted module itself."""
    return backend if "." in backend else f"rlflow.backends.{backend}"


def source_files(backend: str) -> list[Path]:
    """The Python files of a backend. Raises PlanError for one that is not there."""
    try:
        spec = importlib.util.find_spec(module_name(backend))
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise no_backend(backend)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return [file for folder in folders for file in sorted(folder.glob("*.py"))] or [Path(spec.origin or "")]


def no_backend(name: str) -> PlanError:
    return PlanError.of("backend", f"there is no backend '{name}'", found=name, expected=f"one of {listed(SHIPPED)}, or a dotted module",
                        nearest=nearest(name, SHIPPED), remedy="choose one of them; rlflow doctor says which can be used here")


def unknown_names(role: str, given: Mapping[str, Any], settings: Iterable[str], every: Mapping[str, Any]) -> list[Problem]:
    """Settings given for a role that neither of its halves has. ``every``: those that were given for all roles."""
    known = {*settings, *ROLE_KEYWORDS}
    return [
        unknown_flag(name, known) if name in every else
        Problem("unknown-setting", f"role '{role}' has no setting '{name}'", found=f"--{role}.{name}",
                expected=f"one of {listed(sorted(known))}", nearest=nearest(name, known),
                remedy="see --help for all settings with their defaults")
        for name in given
        if name not in known
    ]
