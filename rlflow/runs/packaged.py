"""Packaged tasks: what a run uses when no model and no data are named. One TOML per algorithm, and a default for the others."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rlflow.data.tasks
from rlflow.config.flags import read_toml


def uses_packaged(values: Mapping[str, Any]) -> bool:
    """Whether a run takes the packaged task: where neither a model nor data are named. ``values``: by flag."""
    return values.get("model") is None and not values.get("data") and values.get("backend") != "null"


def beneath(flow: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the packaged task of a flow, where it is taken, as far as they go with those that are given: an environment that is
    given has rewards and settings of its own."""
    if not uses_packaged(values):
        return {}
    task = packaged(flow)[1]
    if not any(name == "env" or name.endswith(".env") for name in values):
        return task
    return {
        name: value for name, value in task.items() if name != "reward" and name.partition(".")[0] != "env"
    }


def environment_beneath(flow: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The environment, and its settings, of the packaged task of a flow, where it is taken: they shape the flow's graph."""
    return {name: value for name, value in beneath(flow, values).items() if name.partition(".")[0] == "env"}


def packaged(flow: str) -> tuple[str, dict[str, Any]]:
    """The task for a flow: its file's name and its values, with folders and files made absolute."""
    folder = Path(next(iter(rlflow.data.tasks.__path__)))
    path = folder / f"{flow}.toml"
    path = path if path.is_file() else folder / "default.toml"
    values = read_toml(path)
    for name, value in values.items():
        if (name == "model" or name.endswith(".model")) and (folder / str(value)).exists():
            values[name] = str(folder / value)
    values["data"] = tuple(
        str(folder / source) if (folder / source).exists() else source for source in values.get("data", ())
    )
    values["reward"] = [
        str(folder / reward) if ".py:" in reward else reward for reward in values.get("reward", [])
    ]
    return path.stem, values
