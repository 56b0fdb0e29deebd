"""What reward processes may do and see. Those of the scorers that come with rlflow may only compute; those of
users' rewards may do what the user allows."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from rlflow.processes.sandbox import limits
from rlflow.processes.watchdog import kin

MARK = "RLFLOW_REWARD_WORKER"  # set in the environment of workers
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # where the user did not: so that a reward repeats
OWN = {MARK: "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Confinement:
    """The rights that processes of users' rewards have."""

    variables: tuple[str, ...] = ()  # names of the variables of this process's environment that they see
    folders: tuple[str, ...] = ()  # where they may change files, besides the folder of each process
    network: bool = False  # whether they may open network connections
    memory: int | None = None  # most bytes of a process; None: a share of the machine's memory

    def words(self, built_in: bool, folder: str) -> str:
        """The confinement as JSON, for a worker's command line. ``folder``: the private folder of the
        worker."""
        folders = [os.path.abspath(os.path.expanduser(folder_name)) for folder_name in self.folders]
        return json.dumps(
            {
                "built_in": built_in,
                "folder": folder,
                "folders": folders,
                "network": self.network,
                "memory": self.memory,
            }
        )

    def environment(self, built_in: bool, folder: str, name: str) -> dict[str, str]:
        """The environment of a worker. ``folder``: its private folder. ``name``: what it adds to the run's
        mark, by which it and all that it starts are found."""
        mark = kin.marks(name, os.environ.get(kin.MARK, ""))
        return {
            **FIXED,
            **limits.environment(folder, () if built_in else self.variables),
            **OWN,
            kin.MARK: mark,
        }


STRICT = Confinement()  # no variable, no folder, no network
