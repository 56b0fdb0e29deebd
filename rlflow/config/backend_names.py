"""Look up backends and their settings, with types, without importing any backend."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.author.annotations import annotated
from rlflow.author.settings import parse
from rlflow.compiler.graph.model import SIDES
from rlflow.config.flags import NULL, ROLE_KEYWORDS, RoleConfig
from rlflow.config.meant import Known, unknown_flag, unknown_setting
from rlflow.errors import PlanError, Problem, listed, nearest

SHIPPED = ("deepspeed", "fsdp", "local", "null", "vllm")


def module_name(backend: str) -> str:
    """Return a backend's dotted module name.

    A name without a dot is one of rlflow's own backends.
    """
    return backend if "." in backend else f"rlflow.backends.{backend}"


def source_files(backend: str) -> list[Path]:
    """Return a backend's Python files. Raises PlanError if there is no such backend."""
    try:
        spec = importlib.util.find_spec(module_name(backend))
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        raise no_backend(backend)
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return [file for folder in folders for file in sorted(folder.glob("*.py"))] or [Path(spec.origin or "")]


def no_backend(name: str) -> PlanError:
    """Return the error for an unknown backend."""
    return PlanError.of(
        "backend",
        f"there is no backend '{name}'",
        found=name,
        expected=f"one of {listed(SHIPPED)}, or a dotted module",
        nearest=nearest(name, SHIPPED),
        remedy="choose one of them; rlflow doctor lists those that work here",
    )


def setting_problems(role: RoleConfig, types: Mapping[str, Any], known: Known) -> list[Problem]:
    """Return a problem for each of a role's settings that is unknown or has a value of the wrong type.

    ``types`` maps the settings of the role's two backends to their types. It comes from ``role_types`` (read
    from source files, for `check`) or from ``class_types`` (for a run). ``known``: other names in the flow,
    used for suggestions.
    """
    return [*unknown_settings(role, types, known), *unfit_values(role, types)]


def unknown_settings(role: RoleConfig, names: Iterable[str], known: Known) -> list[Problem]:
    """Return a problem for each of a role's settings that is not in ``names``.

    ``names``: the settings of the role's trainer and generator. ``known``: other names in the flow, used for
    suggestions.
    """
    settings = {*names, *ROLE_KEYWORDS}
    return [
        unknown_flag(name, settings, known)
        if name in role.shared
        else unknown_setting(role.name, name, settings, known)
        for name in role.values
        if name not in settings
    ]


def unfit_values(role: RoleConfig, types: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each of a role's settings whose value has the wrong type.

    ``types`` maps settings to their types. A setting that isn't in ``types`` accepts any value.
    """
    for name, value in role.values.items():
        try:
            parse(types.get(name, Any), value)
        except ValueError as error:
            yield Problem(
                "setting-range",
                f"the setting '{role.flag(name)}' does not fit",
                found=repr(value),
                expected=str(error),
                remedy=f"change --{role.flag(name)}",
                setting=role.flag(name),
            )


@functools.cache
def setting_types(backend: str) -> Mapping[str, Any]:
    """Read the type of each of a backend's settings, by name, from its source files.

    The settings are the fields of the backend's classes named …Settings, including fields inherited from
    other backends. If the source doesn't determine a type, it is Any. Raises PlanError if there is no such
    backend.
    """
    types: dict[str, Any] = {}
    for file in source_files(backend):
        tree = ast.parse(file.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and node.name.endswith("Settings"):
                for other in _extended(node, tree) - {module_name(backend)}:
                    types = {**setting_types(other), **types}
                types |= {
                    item.target.id: annotated(item.annotation)
                    for item in node.body
                    if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
                }
    return types


def role_types(backends: Mapping[str, str]) -> dict[str, Any]:
    """Return the type of each setting of a role's trainer and generator, by name.

    Each setting is listed twice: as ``NAME`` and with its side as a prefix, such as ``trainer.NAME``.
    ``backends`` maps each side ("trainer", "generator") to the name of its backend.
    """
    own = {
        name: type_
        for half, backend in backends.items()
        for each, type_ in setting_types(backend).items()
        for name in (each, f"{half}.{each}")
    }
    return untouched(backends) | own


def untouched(backends: Mapping[str, str]) -> dict[str, Any]:
    """Return the type of each setting that the null backend accepts but ignores, by name.

    These are the settings of all of rlflow's backends, so that the command for a real run also works without
    models. If several backends share a setting, `local` decides its type. Empty if neither side uses the null
    backend.
    """
    if NULL not in backends.values():
        return {}
    types = {
        name: type_
        for backend in (*(each for each in SHIPPED if each not in ("local", NULL)), "local")
        for name, type_ in setting_types(backend).items()
        if name not in setting_types(NULL)
    }
    return types | {
        f"{half}.{name}": type_ for half in SIDES if backends[half] == NULL for name, type_ in types.items()
    }


def _extended(kind: ast.ClassDef, tree: ast.Module) -> set[str]:
    """Return the backends whose classes are bases of ``kind``, a class in the module ``tree``."""
    bases = {name.id for base in kind.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {
        node.module or "" for node in froms for alias in node.names if (alias.asname or alias.name) in bases
    }
    shipped = module_name("")
    return {".".join(module.split(".")[:3]) if module.startswith(shipped) else module for module in modules}
