"""What the processes of rewards may do and see: those of the scorers that come with rlflow nothing but compute, users' rewards what the
user allows."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from rlflow.isolation import limits
from rlflow.watchdog import kin

MARK = "RLFLOW_REWARD_WORKER"  # set in the environment of workers
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # where the user did not: so that a reward repeats
OWN = {MARK: "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Confinement:
    """Of users' rewards. variables: names of this process's environment that they see; folders: where they may change files, besides their
    own; network: whether they reach it; memory: bytes of a process, or by default a share of the machine's."""

    variables: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    network: bool = False
    memory: int | None = None

    def words(self, built_in: bool, folder: str) -> str:
        """For the worker, as JSON. folder: its own."""
        folders = [os.path.abspath(os.path.expanduser(each)) for each in self.folders]
        return json.dumps({"built_in": built_in, "folder": folder, "folders": folders, "network": self.network, "memory": self.memory})

    def environment(self, built_in: bool, folder: str, name: str) -> dict[str, str]:
        """name: of the process, in the mark of it and of all that it starts."""
        mark = kin.marks(name, os.environ.get(kin.MARK, ""))
        return {**FIXED, **limits.environment(folder, () if built_in else self.variables), **OWN, kin.MARK: mark}


STRICT = Confinement()  # they see and may do nothing
