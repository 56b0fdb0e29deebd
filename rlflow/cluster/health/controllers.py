"""Checks of Ray's controlling processes, for a Ray cluster that a run has started or joined.

Ray reports the death of such a process late: it tries to reach the process for a minute, and then ends all
processes that are connected to it. rlflow therefore checks the processes itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.cluster.reach import Listening
from rlflow.processes.watchdog import process_tag

RAYLET = "raylet"  # starts workers and stores objects; when it ends, they end too
GCS = "gcs_server"  # knows where each worker is


@dataclass(frozen=True)
class Controllers:
    """The controlling processes of a Ray cluster that this run checks.

    For a Ray cluster on this machine, these are all of them. For a joined Ray cluster, only the GCS is
    checked.
    """

    # name → (pid, start); empty for a joined Ray cluster
    processes: Mapping[str, process_tag.Known] = field(default_factory=dict)
    gcs: Listening | None = None  # check of a Ray cluster that was joined at an address

    @classmethod
    def of_this_process(cls) -> Controllers:
        """Return the controlling processes of the Ray cluster that this process has just started."""
        names = {
            process: os.path.basename(process_tag.command(process[0]))
            for process in process_tag.descendants(os.getpid())
        }
        return cls({name: process for process, name in names.items() if name in (RAYLET, GCS)})

    def lost(self, *names: str) -> str | None:
        """Describe the first controlling process that has died; None if all are alive.

        ``names``: the processes to check. Without names, all are checked, including the GCS of a joined Ray
        cluster.
        """
        for name, (pid, start) in self.processes.items():
            if name in (names or self.processes) and not process_tag.lives(pid, start):
                return (
                    f"Ray's {name} (pid {pid}) has died; without it no worker can be started and no run on pools "
                    "can continue"
                )
        return self.gcs.lost() if self.gcs is not None and not names else None
