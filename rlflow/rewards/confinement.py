"""Define the rights of reward processes.

Processes of rlflow's own scorers may only compute. Processes of users' rewards have the rights that the user
gives them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from rlflow.processes.sandbox import limits
from rlflow.processes.watchdog import process_tag

MARK = "RLFLOW_REWARD_WORKER"  # set in the environment of workers
FIXED = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}  # defaults that make rewards repeatable
OWN = {MARK: "1", "PYTHONDONTWRITEBYTECODE": "1"}


@dataclass(frozen=True)
class Confinement:
    """The rights of processes with users' rewards."""

    variables: tuple[str, ...] = ()  # names of environment variables that they can read
    folders: tuple[str, ...] = ()  # where they may change files, besides the private folder of each process
    network: bool = False  # whether they may open network connections
    memory: int | None = None  # most bytes of a process; None: a share of the machine's memory

    def words(self, built_in: bool, folder: str) -> str:
        """Return the confinement as JSON for a worker's command line.

        ``folder``: the worker's private folder.
        """
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
        """Return the environment variables of a worker.

        ``folder``: its private folder. ``name``: added to the run's process tag; by the tag rlflow finds the
        worker and its descendants.
        """
        mark = process_tag.marks(name, os.environ.get(process_tag.MARK, ""))
        return {
            **FIXED,
            **limits.environment(folder, () if built_in else self.variables),
            **OWN,
            process_tag.MARK: mark,
        }


STRICT = Confinement()  # no variables, no folders, no network
