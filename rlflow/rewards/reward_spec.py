"""Parses the rewards that a user names.

A reward is ``task``, ``math``, ``env``, ``file.py:function``, a model folder or a server's URL, optionally
with a data source and a weight.
"""

from __future__ import annotations

import inspect
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from rlflow.data.hub_names import COMMIT, folder_name
from rlflow.data.json_fields import Wanted
from rlflow.errors import Place, PlanError, listed, nearest
from rlflow.rewards import text
from rlflow.rewards.forms import OPENRLHF, TRL

BUILT_IN = ("task", "math", "env")
SOURCE = re.compile(r"\w[\w.-]*")  # the name of a source of data
FORMS = (
    "task, math, env, file.py:function, a model folder, or http://HOST/PATH; each may end in @source "
    "and :weight"
)


@dataclass(frozen=True)
class RewardSpec:
    """A reward as named by the user, not bound to data yet.

    `rlflow.config.roles.rewards` later binds rewards of kind "model" as roles, and rewards of kind "env" to
    the environment of their episodes.
    """

    kind: Literal["task", "math", "function", "model", "remote", "env"]
    name: str  # name in metrics
    weight: float = 1.0  # factor in the sum of several rewards
    path: str = ""  # the function's file, the model's folder or the server's URL
    function: str = ""
    module: str = ""  # dotted name of the function's file if the file is part of an importable package
    source: str = ""  # name of the data source whose rows it scores; empty: all sources

    @property
    def judges_text(self) -> bool:
        """True if a process or a server scores the text of rows; False if a model or an environment does."""
        return self.kind not in ("model", "env")


def parse_reward(written: str) -> RewardSpec:
    """Parse a reward such as ``file.py:function:0.5``.

    A function's file is read, but not imported. Raises PlanError if the string doesn't name a reward.
    """
    if written.startswith(("http://", "https://")):
        return _remote(written)
    body, weight = _split_weight(os.path.expanduser(written))
    body, source = _split_source(body)
    if body in BUILT_IN:
        return RewardSpec(body, body, weight, source=source)  # type: ignore[arg-type]
    if ".py" in body:
        return replace(_function(written, body, weight), source=source)
    if body and Path(body).is_dir():
        return RewardSpec("model", folder_name(Path(body)), weight, path=_model(body), source=source)
    raise _unknown(written, body)


def model_text(written: str) -> str:
    """Return the part of a reward's text that may name a model: without source and weight.

    A full commit after an @ is part of the model. No file is read.
    """
    if written.startswith(("http://", "https://")):
        return written
    body, _ = _split_weight(written)
    return _split_source(body)[0]


def check_sources(rewards: Sequence[RewardSpec], sources: Sequence[str]) -> None:
    """Check that rewards and data sources match.

    ``rewards``: the rewards of one role, or of all roles. Raises PlanError if a reward names an unknown
    source, or if a source has no reward.
    """
    for reward in rewards:
        if reward.source and reward.source not in sources:
            raise PlanError.of(
                "reward-source",
                f"the reward '{reward.name}@{reward.source}' names an unknown source of the data",
                found=reward.source,
                expected=f"one of {listed(sources)}"
                if sources
                else "data sources with names, given with --data",
                nearest=nearest(reward.source, sources),
                remedy="name the source with --data NAME=FILE, or its file's stem",
            )
    lacking = [name for name in sources if not any(reward.source in ("", name) for reward in rewards)]
    if lacking and rewards:
        raise PlanError.of(
            "source-reward",
            f"the source '{lacking[0]}' has no reward",
            found=", ".join(f"{reward.name}@{reward.source}" for reward in rewards),
            expected="a reward for each source",
            remedy=f"--reward task@{lacking[0]}, or a reward without a source, which scores all sources",
        )


def readers(specs: Iterable[RewardSpec]) -> dict[str, Place]:
    """For each column that reward functions read, return where the first such function is defined."""
    places: dict[str, Place] = {}
    for spec in specs:
        if spec.kind == "function":
            columns = text.reads(spec.path, spec.function)
            places = dict.fromkeys((*columns.required, *columns.optional), columns.place) | places
    return places


def wanted(specs: Iterable[RewardSpec]) -> Wanted:
    """Return the data fields that rewards may read."""
    specs = list(specs)
    functions = [text.reads(spec.path, spec.function) for spec in specs if spec.kind == "function"]
    optional = {name: False for columns in functions for name in columns.optional}
    required = {name: True for columns in functions for name in columns.required}
    forms = [columns.form for columns in functions if columns.form] + [
        OPENRLHF for spec in specs if spec.kind == "remote"
    ]
    truths = {form.truth: True for form in forms if form.truth}
    return Wanted(
        optional | required | truths,
        any(columns.rest for columns in functions),
        model_prompt=OPENRLHF in forms,
        conversation=TRL in forms,
    )


def weights(rewards: Iterable[str]) -> tuple[float, ...]:
    """Return the weights of rewards given as the user wrote them.

    Raises PlanError for a string that doesn't name a reward.
    """
    return tuple(parse_reward(reward).weight for reward in rewards)


def from_function(function: Callable[..., Any], weight: float = 1.0) -> RewardSpec:
    """Return the spec for a Python function.

    Raises PlanError if the function isn't at the top level of a file, because another process couldn't load
    it.
    """
    code, name = getattr(function, "__code__", None), getattr(function, "__qualname__", repr(function))
    if code is None or "." in name or "<" in name or not os.path.isfile(code.co_filename):
        raise PlanError.of(
            "reward-function",
            f"the reward {name} cannot be loaded by another process",
            found=_what(function),
            expected="a function at the top level of a file",
            remedy="rewards run in separate processes with deadlines: put the function in a file "
            "of its own, reward='file.py:function'",
        )
    path = os.path.abspath(code.co_filename)
    text.reads(path, name)
    return RewardSpec("function", name, weight, path, name, _package_module(function.__module__, path))


def _what(function: Callable[..., Any]) -> str:
    if not inspect.isfunction(function):
        return f"an object of type {type(function).__name__}"
    return (
        "a lambda"
        if function.__name__ == "<lambda>"
        else "a function defined inside another one, in a class or in a console"
    )


def _package_module(module: str, path: str) -> str:
    """Return a module's dotted name in its package, for relative imports, or "" if it isn't in a package."""
    existing = sys.modules.get(module)
    same = existing is not None and os.path.abspath(getattr(existing, "__file__", None) or "") == path
    return module if same and "." in module else ""


def _split_weight(text: str) -> tuple[str, float]:
    """Split a string such as ``math:0.5`` into (text without the weight, weight).

    The weight is 1 if none is given.
    """
    body, _, last = text.rpartition(":")
    try:
        weight = float(last) if body else 1.0
    except ValueError:
        return text, 1.0
    # the function of a reward may be called nan or inf, which would also parse as a weight
    if not body or (body.endswith(".py") and last.isidentifier()):
        return text, 1.0
    if not math.isfinite(weight) or weight == 0:
        raise PlanError.of(
            "reward-weight",
            f"the weight of reward '{body}' is invalid",
            found=last,
            expected="a finite number other than 0",
            remedy=f"--reward {body}:1.0, or remove the weight",
        )
    return body, weight


def _split_source(text: str) -> tuple[str, str]:
    """Split a string such as ``math@source`` into (text without the source, source).

    The source may be empty. An @ in an existing path, or before a commit, doesn't separate a source.
    """
    body, at, source = text.rpartition("@")
    names = at and body and SOURCE.fullmatch(source) and not COMMIT.fullmatch(source)
    return (body, source) if names and not Path(text).exists() else (text, "")


def _remote(written: str) -> RewardSpec:
    """Parse a reward that is a server's URL.

    A number after the URL's path is the weight. A number after the host is the port.
    """
    scheme, _, rest = written.partition("://")
    host, slash, path = rest.partition("/")
    path, weight = _split_weight(path) if path else (path, 1.0)
    path, source = _split_source(path) if path else (path, "")
    url = f"{scheme}://{host}{slash}{path}"
    try:
        parts = urlsplit(url)
        usable = bool(parts.hostname) and (parts.port is None or parts.port > 0) and parts.username is None
    except ValueError:  # invalid port
        usable = False
    if not usable:
        raise PlanError.of(
            "reward-url",
            "the reward's URL is invalid",
            found=f"{scheme}://…@…" if "@" in host else url,
            expected="http://HOST:PORT/PATH, without a user name",
            remedy="--reward http://127.0.0.1:8000/score, with the host, port and path of the server",
        )
    return RewardSpec(
        "remote", path.rstrip("/").rpartition("/")[2] or str(parts.hostname), weight, path=url, source=source
    )


def _function(written: str, body: str, weight: float) -> RewardSpec:
    path, _, name = body.rpartition(":")
    if path.rpartition(".py:")[2].isidentifier() and ".py:" in path:
        raise PlanError.of(
            "reward-weight",
            f"the weight of reward '{path}' is not a number",
            found=name,
            expected="a finite number other than 0",
            remedy=f"{path}:1.0, or remove it",
        )
    if not path.endswith(".py"):
        raise _no_function(written, (path or body).rstrip(":"))
    text.reads(path, name)
    return RewardSpec("function", name, weight, os.path.abspath(path), name)


def _no_function(written: str, path: str) -> PlanError:
    """Return the error for a reward that names a file but no function. It lists the file's functions."""
    names = [f"{path}:{name}" for name in text.functions(path)] if path.endswith(".py") else []
    return PlanError.of(
        "reward-function",
        f"the reward '{written}' does not name a function of a file",
        found=written,
        expected="file.py:function",
        remedy=f"name one of: {listed(names)}"
        if names
        else "name a function that is defined in a Python file: --reward FILE.py:FUNCTION",
    )


def _model(folder: str) -> str:
    if not (Path(folder) / "config.json").exists():
        raise PlanError.of(
            "reward-model",
            f"the folder {folder} does not contain a model",
            expected="a config.json in it",
            found=listed(sorted(item.name for item in Path(folder).iterdir())),
            remedy="name the folder that contains the config.json of the model",
        )
    return os.path.abspath(folder)


def _unknown(written: str, body: str) -> PlanError:
    folder = Path(body).parent
    names = [*BUILT_IN, *(str(item) for item in folder.iterdir())] if folder.is_dir() else [*BUILT_IN]
    return PlanError.of(
        "reward-unknown",
        f"no such reward: '{written}'",
        found=body,
        expected=FORMS,
        nearest=nearest(body, names),
        remedy="write one of these; a path starts from the folder in which the command runs",
    )
