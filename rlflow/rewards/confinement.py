"""The permissions of reward processes.

Processes that run rlflow's own scorers may do nothing but compute. Processes that run users' rewards may do
what the user permits.
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
    """The permissions of processes that run users' rewards."""

    variables: tuple[str, ...] = ()  # names of the environment variables that the processes can read
    # folders whose files they may change, in addition to the private folder of each process
    folders: tuple[str, ...] = ()
    network: bool = False  # whether they may open network connections
    memory: int | None = None  # maximum bytes of memory per process; None: a share of the machine's memory

    def words(self, built_in: bool, folder: str) -> str:
        """Return a worker's permissions as JSON, for its command line.

        ``built_in``: True if the worker runs rlflow's own scorers, which may only compute. ``folder``: the
        worker's private folder.
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
        """Return the environment variables for a worker.

        ``folder``: the worker's private folder. ``name``: a suffix for the run's process tag, by which rlflow
        finds the worker and its descendants.
        """
        mark = process_tag.marks(name, os.environ.get(process_tag.MARK, ""))
        return {
            **FIXED,
            **limits.environment(folder, () if built_in else self.variables),
            **OWN,
            process_tag.MARK: mark,
        }


STRICT = Confinement()  # no variables, no folders, no network
