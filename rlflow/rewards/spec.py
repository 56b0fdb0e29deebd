"""What a user names as a reward: ``task``, ``math``, ``file.py:function`` or a model folder, each with a weight."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlflow.errors import Place, PlanError, listed, nearest
from rlflow.rewards import text

BUILT_IN = ("task", "math")
FORMS = "task, math, file.py:function, or a model folder; each may end in :weight"


@dataclass(frozen=True)
class RewardSpec:
    """A reward as named, not yet bound to data. ``path`` is the function's file or the model's folder; a model is bound by the
    engine as a role. ``module`` is set where the function's file is part of an importable package."""

    kind: Literal["task", "math", "function", "model"]
    name: str
    weight: float = 1.0
    path: str = ""
    function: str = ""
    module: str = ""


def parse_reward(written: str) -> RewardSpec:
    """The reward that was written. Raises PlanError where there is no such thing; a function's file is read, not imported."""
    body, weight = _weighed(os.path.expanduser(written))
    if body in ("task", "math"):
        return RewardSpec("task" if body == "task" else "math", body, weight)
    if ".py" in body:
        return _function(written, body, weight)
    if body and Path(body).is_dir():
        return RewardSpec("model", Path(body).name, weight, path=_model(body))
    raise _unknown(written, body)


def readers(specs: Iterable[RewardSpec]) -> dict[str, Place]:
    """By column where the function is that reads it, of several the first."""
    found: dict[str, Place] = {}
    for spec in specs:
        if spec.kind == "function":
            read = text.reads(spec.path, spec.function)
            found = dict.fromkeys((*read.required, *read.optional), read.place) | found
    return found


def from_function(function: Callable[..., Any], weight: float = 1.0) -> RewardSpec:
    """The spec of a function that stands at the top level of a file. Raises PlanError for one that a process cannot import."""
    code, name = getattr(function, "__code__", None), getattr(function, "__qualname__", repr(function))
    if code is None or "." in name or "<" in name or not os.path.isfile(code.co_filename):
        raise PlanError.of("reward-function", f"the reward {name} cannot be loaded by another process", found=_what(function),
                           expected="a function at the top level of a file",
                           remedy="rewards run in processes that are killed at their deadline: put the function in a file of its own, "
                                  "reward='file.py:function'")
    path = os.path.abspath(code.co_filename)
    text.reads(path, name)
    return RewardSpec("function", name, weight, path, name, _package_module(function.__module__, path))


def _what(function: Callable[..., Any]) -> str:
    if not inspect.isfunction(function):
        return f"an object of type {type(function).__name__}"
    return "a lambda" if function.__name__ == "<lambda>" else "a function defined inside another one, in a class or in a console"


def _package_module(module: str, path: str) -> str:
    """The module's dotted name where it is part of a package, so that its relative imports hold; else an empty string."""
    loaded = sys.modules.get(module)
    same = loaded is not None and os.path.abspath(getattr(loaded, "__file__", None) or "") == path
    return module if same and "." in module else ""


def _weighed(written: str) -> tuple[str, float]:
    """The text without its weight, and the weight."""
    body, _, last = written.rpartition(":")
    try:
        weight = float(last) if body else 1.0
    except ValueError:
        return written, 1.0
    if not body:
        return written, 1.0
    if not math.isfinite(weight) or weight == 0:
        raise PlanError.of("reward-weight", f"the weight of reward '{body}' has no use", found=last, expected="a number that is not 0")
    return body, weight


def _function(written: str, body: str, weight: float) -> RewardSpec:
    path, _, name = body.rpartition(":")
    if path.rpartition(".py:")[2].isidentifier() and ".py:" in path:
        raise PlanError.of("reward-weight", f"the weight of reward '{path}' is no number", found=name, expected="a number that is not 0",
                           remedy=f"{path}:1.0, or leave it out")
    if not path.endswith(".py"):
        raise _no_function(written, (path or body).rstrip(":"))
    text.reads(path, name)
    return RewardSpec("function", name, weight, os.path.abspath(path), name)


def _no_function(written: str, path: str) -> PlanError:
    """The error for a reward with a file but no function, with the functions that the file has."""
    names = [f"{path}:{name}" for name in text.functions(path)] if path.endswith(".py") else []
    return PlanError.of("reward-function", f"the reward '{written}' does not name a function of a file", found=written,
                        expected="file.py:function", remedy=f"name one of: {listed(names)}" if names else "")


def _model(folder: str) -> str:
    if not (Path(folder) / "config.json").exists():
        raise PlanError.of("reward-model", f"the folder {folder} holds no model", expected="a config.json in it",
                           found=listed(sorted(item.name for item in Path(folder).iterdir())))
    return os.path.abspath(folder)


def _unknown(written: str, body: str) -> PlanError:
    folder = Path(body).parent
    names = [*BUILT_IN, *(str(item) for item in folder.iterdir())] if folder.is_dir() else [*BUILT_IN]
    return PlanError.of("reward-unknown", f"no such reward: '{written}'", found=body, expected=FORMS, nearest=nearest(body, names))
