"""Names of backends and of their settings with the types of these, known without loading any of them."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlflow.author.annotations import annotated
from rlflow.author.settings import parse
from rlflow.compiler.graph.model import HALVES
from rlflow.config.flags import NULL, ROLE_KEYWORDS, RoleConfig
from rlflow.config.meant import Known, unknown_flag, unknown_setting
from rlflow.errors import PlanError, Problem, listed, nearest

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
    """The error that there is no backend of this name."""
    return PlanError.of(
        "backend",
        f"there is no backend '{name}'",
        found=name,
        expected=f"one of {listed(SHIPPED)}, or a dotted module",
        nearest=nearest(name, SHIPPED),
        remedy="choose one of them; rlflow doctor says which can be used here",
    )


def setting_problems(role: RoleConfig, types: Mapping[str, Any], known: Known) -> list[Problem]:
    """The settings of a role that neither of its halves has, and those whose values are not of their
    ``types`` (by name, as a Settings class annotates them). `check` takes the types from the sources of
    backends (``role_types``), a run from their classes. ``known``: what else of the flow an unknown name may
    mean."""
    return [*unknown_settings(role, types, known), *unfit_values(role, types)]


def unknown_settings(role: RoleConfig, names: Iterable[str], known: Known) -> list[Problem]:
    """The settings of a role that are not among ``names``, those of its two halves."""
    settings = {*names, *ROLE_KEYWORDS}
    return [
        unknown_flag(name, settings, known)
        if name in role.shared
        else unknown_setting(role.name, name, settings, known)
        for name in role.values
        if name not in settings
    ]


def unfit_values(role: RoleConfig, types: Mapping[str, Any]) -> Iterator[Problem]:
    """The settings of a role whose values are not of their types. A setting without a type may have any
    value."""
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
            )


@functools.cache
def setting_types(backend: str) -> Mapping[str, Any]:
    """The fields of the classes named …Settings in a backend's source, and of those of other backends that
    they extend, with their types:
    Any where the source alone does not tell. Raises PlanError for a backend that is not there."""
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
    """The settings of a role by the backends of its halves, each also with its half before it."""
    own = {
        name: type_
        for half, backend in backends.items()
        for each, type_ in setting_types(backend).items()
        for name in (each, f"{half}.{each}")
    }
    return untouched(backends) | own


def untouched(backends: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the null backend accepts beside its own and ignores, with their types: those of all
    shipped backends, so that the command of a real run can be tried without its models. Of a setting that
    several have, the type is that of the local one."""
    if NULL not in backends.values():
        return {}
    types = {
        name: type_
        for backend in (*(each for each in SHIPPED if each not in ("local", NULL)), "local")
        for name, type_ in setting_types(backend).items()
        if name not in setting_types(NULL)
    }
    return types | {
        f"{half}.{name}": type_ for half in HALVES if backends[half] == NULL for name, type_ in types.items()
    }


def _extended(kind: ast.ClassDef, tree: ast.Module) -> set[str]:
    """The backends from whose modules the bases of a class come."""
    bases = {name.id for base in kind.bases for name in ast.walk(base) if isinstance(name, ast.Name)}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules = {
        node.module or "" for node in froms for alias in node.names if (alias.asname or alias.name) in bases
    }
    shipped = module_name("")
    return {".".join(module.split(".")[:3]) if module.startswith(shipped) else module for module in modules}
