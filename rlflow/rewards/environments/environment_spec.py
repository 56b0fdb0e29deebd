"""Parses the environment named by ``--env FILE.py:Class`` and configured by ``--env.NAME VALUE``.

The result holds the class, its settings, and the limits on its episodes.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
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


# Library → (module, class) of the adapter for its environments, named LIBRARY:ID.
ADAPTERS: Mapping[str, tuple[str, str]] = {
    "openenv": ("rlflow.rewards.environments.adapters.openenv", "OpenEnvSession"),
    "openrlhf": ("rlflow.rewards.environments.adapters.openrlhf", "Agent"),
    "skyrl_gym": ("rlflow.rewards.environments.adapters.skyrl_gym", "Gym"),
    "textarena": ("rlflow.rewards.environments.adapters.textarena", "Game"),
}


@dataclass(frozen=True)
class Bounds:
    """Limits on episodes. Every environment accepts them as ``--env.NAME``."""

    turns: Annotated[int, Ge(1)] = 8  # maximum number of model turns in an episode
    # Maximum number of tokens in an environment message between two turns; longer ones are cut.
    says: Annotated[int, Ge(1)] = 512
    seconds: Annotated[float, Gt(0)] = 60.0  # seconds for each call of the environment
    parallel: Annotated[int, Ge(1)] | None = None  # maximum number of processes; None: one per core
    # Whether the text of a control token in an environment message stays text, or becomes the token.
    control_tokens: Literal["text", "allow"] = "text"


@dataclass(frozen=True)
class EnvironmentSpec:
    """An environment's class and settings, from which any process can create episodes.

    It has only plain values, so it can be sent to another process.
    """

    name: str  # name in messages and graphs, such as search.py:Search
    path: str  # the file that defines the class
    cls: str  # name of the class
    module: str  # dotted name of the file's module if it is part of a package; else empty
    source: ClassSource
    settings: Mapping[str, Any]  # settings of the class, plain values
    paths: tuple[str, ...]  # names of the settings whose values are paths
    bounds: Bounds

    @property
    def place(self) -> Place:
        """The file and line that define the class."""
        return self.source.place

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The tools that a model may call. Empty if the environment has ``step`` instead."""
        return self.source.tools

    @property
    def library(self) -> str:
        """The library that the environment comes from. Empty for rlflow's and for users' own environments."""
        return self.name.partition(":")[0] if self.module and ":" in self.name else ""

    @cached_property
    def packed(self) -> dict[str, Any]:
        """Return the plain values that a worker process needs to load the class."""
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
        """Return 16 hex digits that identify the class's code, settings and limits on episode length."""
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
    """Parse the environment named by a flag. Its file is read, but not imported.

    ``written``: the flag's value, such as FILE.py:Class. ``values``: the settings given with ``--env.NAME``.
    ``flag``: the flag's name, such as actor.env. Raises PlanError for an unknown environment, and for unknown
    or invalid settings.
    """
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
            expected=f"a name other than {listed(sorted(bounds))}",
            remedy=f"rename it to {reserved[0]}_",
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
    """Return (file, class name, module name) of the environment named by a flag.

    Raises PlanError for an unknown environment.
    """
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
            f"--{flag} does not name an environment: '{written}'",
            found=written,
            expected=f"FILE.py:Class, {listed(f'{library}:ID' for library in ADAPTERS)}, or one of "
            f"{listed(SHIPPED)}",
            nearest=near,
            remedy=f"name one of: {listed(names)}" if names else "write it in one of these forms",
        )
    return os.path.abspath(path), cls, ""


def _settings(
    source: ClassSource, texts: Mapping[str, Any], cls: str, flag: str
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Convert settings from flags to their annotated types, and make relative paths absolute.

    Returns (settings by name, names of the settings that are paths). ``texts``: the values that the user
    gave. If settings are unknown, missing or invalid, raises a single PlanError that lists all of them.
    """
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
                    remedy=f"remove it, or declare it: def __init__(self, *, {name}: str)",
                    setting=f"{flag}.{name}",
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
                    setting=f"{flag}.{name}",
                )
            )
            continue
        if isinstance(values[name], Path):
            paths.append(name)
            values[name] = os.path.abspath(values[name].expanduser())
    PlanError.refuse([*problems, *_missing_settings(source, texts, cls, flag)])
    return values, tuple(paths)


def _missing_settings(
    source: ClassSource, texts: Mapping[str, Any], cls: str, flag: str
) -> Iterator[Problem]:
    """Yield a problem for each required setting that is not among ``texts``."""
    for name, setting in source.settings.items():
        if setting.default is REQUIRED and name not in texts:
            yield Problem(
                "env-setting",
                f"the environment '{cls}' needs the setting '{name}'",
                source.place,
                found="nothing",
                expected=f"--{flag}.{name} VALUE",
                remedy=f"--{flag}.{name} VALUE, or give it a default in __init__",
            )
