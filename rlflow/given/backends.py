"""Backends by name, and the models of a run made with them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch

from rlflow import pretrained
from rlflow.author.settings import override
from rlflow.errors import PlanError, Problem, nearest
from rlflow.execution.engine import Model
from rlflow.extras import missing
from rlflow.given.flags import NULL, Given
from rlflow.given.names import any_shipped, module_name, no_backend, unfit_values, unknown_names
from rlflow.graph.model import Graph, Op, RoleUse
from rlflow.trace.compile import all_nodes
from rlflow.training.protocols import ModelSpec


def backend(name: str) -> Any:
    """The module of a backend: a shipped one's name, or a dotted module. Raises PlanError."""
    module = module_name(name)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # it is there, and something that it imports is not
        raise no_backend(name) from error


HALVES = ("Trainer", "Generator")


class Halves(NamedTuple):
    """What a role needs of its backends."""

    trainer: bool
    generator: bool


Placed = Callable[[RoleUse], Halves]
Loaded = Callable[[str, str, Any], None]  # what is done with a role's half, trainer or generator, as soon as it is there


def halves(graph: Graph, use: RoleUse) -> Halves:
    """A trainer for forwards and updates, a generator for sampling."""
    ops = {node.op for node in all_nodes(graph.nodes) if node.role == use.name}
    return Halves(bool(ops - {Op.GENERATE}), Op.GENERATE in ops)


def settings(module: Any, half: str, role: str, given: Mapping[str, Any]) -> Any:
    """The half's settings from what is given for the role, ``trainer.NAME`` and ``generator.NAME`` before ``NAME``; names of the other half
    are left to it."""
    kind, own = getattr(module, half).Settings, half.lower() + "."
    alone = {name.removeprefix(own): value for name, value in given.items() if name.startswith(own)}
    known = {field.name for field in fields(kind)}
    return override(kind(), {name: value for name, value in {**given, **alone}.items() if name in known}, f"{role}.")


def known_names(modules: tuple[Any, ...]) -> set[str]:
    """The settings that the halves of a role have, each also with its half before it."""
    own = {half: {field.name for field in fields(getattr(module, half).Settings)}
           for half, module in zip(HALVES, modules, strict=True) if hasattr(module, half)}  # fmt: skip
    return {name for half, names in own.items() for each in names for name in (each, f"{half.lower()}.{each}")}


def check_settings(uses: list[RoleUse], given: Given) -> None:
    """Names, values, folders and packages of all roles, before any data or model is loaded. Raises PlanError."""
    problems: list[Problem] = []
    for use in uses:
        folder, modules = _planned(use, given)
        if folder is not None and not all(module.__name__ == "rlflow.backends.null" for module in modules):
            pretrained.check(folder)
        needed = Halves(use.trained or not use.generates, use.generates)
        halfless = [no_half(module, half, use.name) for half, module, need in zip(HALVES, modules, needed, strict=True)
                    if need and not hasattr(module, half)]  # fmt: skip
        # the settings of a half that is not there are unknown, too, which would say no more
        tried = _tried(modules)
        problems += halfless or unknown_names(use.name, given.role(use.name), {*known_names(modules), *tried}, given.every_role, given.own)
        problems += unfit_values(use.name, given.role(use.name), tried, given.every_role)
        for half, module, need in zip(HALVES, modules, needed, strict=True):
            if hasattr(module, half):
                settings(module, half, use.name, given.role(use.name))
                lacking = missing(given.backend(use.name, half.lower()), given.options.device) if need else None
                problems += [lacking] if lacking else []
    if problems:
        raise PlanError(*dict.fromkeys(problems))


def _tried(modules: tuple[Any, ...]) -> dict[str, Any]:
    """Settings of real backends that the null one takes and does nothing with, with their types: the command of a real run is tried so."""
    types: dict[str, Any] = {}
    for half, module in zip(HALVES, modules, strict=True):
        if module.__name__ == module_name(NULL):
            own = {field.name for field in fields(getattr(module, half).Settings)}
            others = {name: type_ for name, type_ in any_shipped().items() if name not in own}
            types |= others | {f"{half.lower()}.{name}": type_ for name, type_ in others.items()}
    return types


def make_models(
    graph: Graph, uses: list[RoleUse], given: Given, device: str, updates: Mapping[str, int], placed: Placed | None = None,
    loaded: Loaded = lambda role, half, made: None, dims: Mapping[str, tuple[tuple[str, int], ...]] | None = None,
    outer: Collection[str] = (),
) -> dict[str, Model]:
    """A Model for each role that is one; with ``placed`` the halves that it names alone, one after another. dims: of each role what is
    sharded along another dimension than the first. outer: roles of whose generator ranks that are not adjacent share a model."""
    keep_whole_products(device, given.options.dtype)
    made = {}
    for use in uses:
        folder, (trainer, generator) = _planned(use, given)
        options, need = given.options, placed(use) if placed else halves(graph, use)
        spec = ModelSpec(folder, use.head, use.trained, device, options.dtype, options.seed, updates.get(use.name, 0),  # type: ignore[arg-type]
                         (dims or {}).get(use.name, ()), use.name in outer)
        chosen = given.role(use.name)
        model = made[use.name] = Model()
        for module, half, needed in zip((trainer, generator), HALVES, need, strict=True):
            if needed:
                own = half_of(module, half, use.name)(spec, settings(module, half, use.name, chosen))
                setattr(model, half.lower(), own)
                loaded(use.name, half.lower(), own)
    return made


def keep_whole_products(device: str, dtype: str) -> None:
    """Products of float32 stay float32 on a GPU, where TF32 would keep ten bits of each factor, whatever the environment or a library has
    said before."""
    if device == "cuda" and dtype == "float32":
        torch.set_float32_matmul_precision("highest")


def half_of(module: Any, half: str, role: str) -> Any:
    """The class of a backend. Raises PlanError where the backend has none."""
    if not hasattr(module, half):
        raise PlanError(no_half(module, half, role))
    return getattr(module, half)


def no_half(module: Any, half: str, role: str) -> Problem:
    name, kind = str(module.__name__).removeprefix("rlflow.backends."), half.lower()
    return Problem("backend-half", f"the backend '{name}' has no {half}, which role '{role}' needs", found=f"{kind} {name}",
                   expected=f"a backend with a {half}, such as local", remedy=f"--{role}.{kind} local")


def model_folder(use: RoleUse, given: Given) -> Path | None:
    """The folder that a role's model starts from, wherever a stage goes later; None where its backend needs none."""
    return _planned(use, given)[0]


def _planned(use: RoleUse, given: Given) -> tuple[Path | None, tuple[Any, Any]]:
    chosen = given.role(use.name)
    names = [given.backend(use.name, half.lower()) for half in HALVES]
    modules = (backend(names[0]), backend(names[1]))
    text = chosen.get("model") or given.options.model
    if text is None:
        if set(names) == {"null"}:
            return None, modules
        raise PlanError.of("no-model", f"role '{use.name}' has no model", found="neither --model nor --" + use.name + ".model",
                           expected="a Hugging Face model folder", remedy="--model FOLDER")
    folder = Path(text)
    if not (folder / "config.json").is_file():
        siblings = [str(p.parent) for p in folder.parent.glob("*/config.json")] if folder.parent.is_dir() else []
        raise PlanError.of("model-folder", f"'{folder}' is no Hugging Face model folder", found="no config.json there",
                           expected="a folder with config.json and weights", nearest=nearest(str(folder), siblings),
                           remedy=f"name another folder with --model or --{use.name}.model; nothing is downloaded: "
                                  f"hf download {folder if len(folder.parts) == 2 else 'OWNER/NAME'} --local-dir FOLDER")
    return folder.absolute(), modules


def numbers(dtype: str) -> torch.dtype:
    """The dtype of what a run computes beside its models, such as scores: float64 in a float64 run, else float32."""
    return torch.float64 if dtype == "float64" else torch.float32


def device_of(name: str) -> str:
    """auto → cuda where there is one. Raises PlanError for cuda without a GPU."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError.of("device", "there is no usable GPU", found="torch.cuda.is_available() is False", expected="--device cpu or auto",
                           remedy="--device cpu")
    return name
