"""An environment as a user names it, ``--env FILE.py:Class`` with ``--env.NAME VALUE``: its class, its
settings and the bounds of its episodes."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt

from rlflow.author.settings import override, parse
from rlflow.errors import Place, PlanError, Problem, listed, nearest
from rlflow.rewards.environments.environment_source import REQUIRED, ClassSource, class_names, read_class
from rlflow.rewards.environments.tool_schema import Tool

SHIPPED: Mapping[str, tuple[str, str]] = {  # name → (module, class) of the environments that come with rlflow
    name: (f"rlflow.rewards.environments.shipped.{name}", name.capitalize())
    for name in ("python", "retry", "search")
}


# library → (module, class) of what speaks for its environments, as LIBRARY:ID
ADAPTERS: Mapping[str, tuple[str, str]] = {
    "openenv": ("rlflow.rewards.environments.adapters.openenv", "OpenEnvSession"),
    "openrlhf": ("rlflow.rewards.environments.adapters.openrlhf", "Agent"),
    "skyrl_gym": ("rlflow.rewards.environments.adapters.skyrl_gym", "Gym"),
    "textarena": ("rlflow.rewards.environments.adapters.textarena", "Game"),
}


@dataclass(frozen=True)
class Bounds:
    """The bounds of episodes, which every environment has as ``--env.NAME``."""

    turns: Annotated[int, Ge(1)] = 8  # most turns of the model in an episode
    # most tokens that the environment says between two turns; the rest is cut off
    says: Annotated[int, Ge(1)] = 512
    seconds: Annotated[float, Gt(0)] = 60.0  # seconds for each call of the environment
    parallel: Annotated[int, Ge(1)] | None = None  # most processes of episodes; without, one for each core
    # whether the text of one, in what the environment says, is text or becomes one
    control_tokens: Literal["text", "allow"] = "text"


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment with its settings, from which any process can make episodes. Plain values, so that it
    can be sent."""

    name: str  # as messages and graphs show it, such as search.py:Search
    path: str  # of the file
    cls: str  # name of the class
    module: str  # dotted name of the file's module where that is part of a package; else empty
    source: ClassSource
    settings: Mapping[str, Any]  # of the class, plain values
    paths: tuple[str, ...]  # names of the settings that are paths
    bounds: Bounds

    @property
    def place(self) -> Place:
        """Where the class is defined."""
        return self.source.place

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that a model may call; none of an environment with ``step``."""
        return self.source.tools

    @property
    def library(self) -> str:
        """The library whose environment it is; empty where it is the user's own, or ships with rlflow."""
        return self.name.partition(":")[0] if self.module and ":" in self.name else ""

    @cached_property
    def packed(self) -> dict[str, Any]:
        """Plain values from which a worker process loads the class."""
        return {
            "file": self.path,
            "source": self.source.text,
            "module": self.module,
            "class": self.cls,
            "settings": dict(self.settings),
            "paths": list(self.paths),
            "tools": bool(self.tools),
            "later": self.source.later,
        }

    @cached_property
    def digest(self) -> str:
        """16 hex digits that change with what the file says, with the settings and with how far episodes
        go."""
        code = ast.unparse(ast.parse(self.source.text))
        shaping = [
            self.cls,
            code,
            dict(sorted(self.settings.items())),
            self.bounds.turns,
            self.bounds.says,
            *([self.bounds.control_tokens] if self.bounds.control_tokens != "text" else []),
        ]
        return hashlib.sha256(json.dumps(shaping, default=str).encode()).hexdigest()[:16]

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in sorted(self.settings.items()))
        return f"{self.name}({settings}), at most {self.bounds.turns} turns"


def parse_environment(written: str, values: Mapping[str, Any], flag: str = "env") -> EnvironmentSpec:
    """The environment that a flag names. values: those of ``--env.NAME``; flag: the one that names it, such
    as actor.env. The file is read, not imported. Raises PlanError where there is no such environment, and for
    settings that it does not have or take."""
    path, cls, module = _named(written, flag)
    library, _, named = written.partition(":")
    if library in ADAPTERS:
        values = {**values, "id": named}
    source = read_class(path, cls)
    bounds = {field.name for field in dataclasses.fields(Bounds)}
    if reserved := [name for name in source.settings if name in bounds]:
        raise PlanError.of(
            "env-setting",
            f"the class '{cls}' has a setting '{reserved[0]}', which is a bound of every episode",
            place=source.place,
            found=f"{reserved[0]} in __init__",
            expected=f"other names than {listed(sorted(bounds))}",
            remedy=f"call it {reserved[0]}_",
        )
    settings, paths = _settings(
        source, {name: value for name, value in values.items() if name not in bounds}, cls, flag
    )
    limits = override(Bounds(), {name: value for name, value in values.items() if name in bounds}, f"{flag}.")
    return EnvironmentSpec(
        f"{Path(path).name}:{cls}" if not module else written,
        path,
        cls,
        module,
        source,
        settings,
        paths,
        limits,
    )


def _named(written: str, flag: str) -> tuple[str, str, str]:
    """(file, class, module) of an environment. Raises PlanError."""
    own = SHIPPED.get(written) or ADAPTERS.get(written.partition(":")[0] if ":" in written else "")
    if own is not None:
        module, cls = own
        return str(Path(__file__).parents[3] / Path(*module.split(".")).with_suffix(".py")), cls, module
    path, _, cls = os.path.expanduser(written).rpartition(":")
    if not path.endswith(".py") or not cls.isidentifier():
        bare = os.path.expanduser(written).removesuffix(":")
        names = [f"{bare}:{name}" for name in class_names(bare)] if bare.endswith(".py") else []
        near = nearest(written, [*SHIPPED, *names, *(f"{library}:{cls}" for library in ADAPTERS)])
        raise PlanError.of(
            "env-unknown",
            f"--{flag} names no environment: '{written}'",
            found=written,
            expected=f"FILE.py:Class, {listed(f'{library}:ID' for library in ADAPTERS)}, or one of "
            f"{listed(SHIPPED)}",
            nearest=near,
            remedy=f"name one of: {listed(names)}" if names else "",
        )
    return os.path.abspath(path), cls, ""


def _settings(
    source: ClassSource, texts: Mapping[str, Any], cls: str, flag: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The values of the class's settings that flags have, in their types, and which of them are paths, made
    absolute. Raises PlanError for unknown, missing and unsuitable ones, all at once."""
    known, problems = source.settings, []
    values: dict[str, Any] = {}
    paths = []
    for name, value in texts.items():
        if name not in known:
            names = [*known, *(field.name for field in dataclasses.fields(Bounds))]
            problems.append(
                Problem(
                    "env-setting",
                    f"the environment '{cls}' has no setting '{name}'",
                    source.place,
                    found=f"--{flag}.{name}",
                    expected=f"one of {listed(names)}",
                    nearest=nearest(name, names),
                    remedy=f"leave it out, or declare it: def __init__(self, *, {name}: str)",
                )
            )
            continue
        try:
            values[name] = parse(known[name].type, value)
        except ValueError as error:
            problems.append(
                Problem(
                    "env-setting",
                    f"the setting '{flag}.{name}' does not fit",
                    source.place,
                    found=repr(value),
                    expected=str(error),
                    remedy=f"change --{flag}.{name}",
                )
            )
            continue
        if isinstance(values[name], Path):
            paths.append(name)
            values[name] = os.path.abspath(values[name].expanduser())
    for name, setting in known.items():
        if setting.default is REQUIRED and name not in texts:
            problems.append(
                Problem(
                    "env-setting",
                    f"the environment '{cls}' needs the setting '{name}'",
                    source.place,
                    found="nothing",
                    expected=f"--{flag}.{name} VALUE",
                    remedy=f"--{flag}.{name} VALUE, or give it a default in __init__",
                )
            )
    PlanError.refuse(problems)
    return values, tuple(paths)
