"""Checks the names of data without opening a file."""

from __future__ import annotations

import os
from pathlib import Path

from rlflow.data import gym
from rlflow.data.hub_names import hub_data
from rlflow.data.records import SUFFIXES, matching, no_such_file, unknown_format
from rlflow.errors import PlanError


def check_path(name: str) -> None:
    """Raise PlanError if the data doesn't exist, or if it's a file in a format that can't be read.

    No file is opened, and data sets on the Hub aren't checked.
    """
    name = os.path.expanduser(name)
    if is_task(name):
        return gym.check_name(name.removeprefix(gym.PREFIX))
    if hub_data(name) is not None or Path(name).is_dir():
        return None
    files = matching(Path(name))
    if not files:
        raise no_such_file(Path(name))
    for file in files:
        if file.suffix not in SUFFIXES:
            raise unknown_format(file)


def is_task(name: str) -> bool:
    """True if a string names a reasoning-gym task, not a path. Raises PlanError for an empty string."""
    if not name:
        raise PlanError.of(
            "data-missing",
            "no data is named",
            found="an empty name",
            expected="a file, a folder, or a reasoning-gym task",
            remedy="--data FILE",
        )
    if name.startswith(gym.PREFIX):
        return True
    path = Path(name)
    return not (path.exists() or path.suffix or len(path.parts) != 1)
