"""Packaged tasks: the data, model and settings of a run without ``--model`` and ``--data``.

Some algorithms have a TOML file of their own. The others share a default file.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rlflow.data.tasks
from rlflow.config.flags import read_toml


def uses_packaged(values: Mapping[str, Any]) -> bool:
    """Whether a run uses a packaged task because it is given neither a model nor data.

    ``values`` holds the flags by name.
    """
    return values.get("model") is None and not values.get("data") and values.get("backend") != "null"


def packaged_values(flow: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a flow's packaged task, or {} if the run doesn't use it.

    ``flow``: the flow's name. ``values`` holds the flags by name. If an environment is given, the task's
    rewards and environment settings are left out.
    """
    if not uses_packaged(values):
        return {}
    task = packaged(flow)[1]
    if not any(name == "env" or name.endswith(".env") for name in values):
        return task
    return {
        name: value for name, value in task.items() if name != "reward" and name.partition(".")[0] != "env"
    }


def packaged_environment(flow: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the packaged task's environment and its settings, which shape the flow's graph.

    Returns {} if the run doesn't use a packaged task.
    """
    return {
        name: value
        for name, value in packaged_values(flow, values).items()
        if name.partition(".")[0] == "env"
    }


def packaged(flow: str) -> tuple[str, dict[str, Any]]:
    """Return (name of the task file, its values) for a flow.

    Paths in the values are absolute.
    """
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
