"""Checks of Ray's controlling processes, in a Ray cluster that a run has started or joined.

When such a process dies, Ray reports it late: it spends a minute trying to reach the process, and then ends
every process connected to it. That's why rlflow does its own checks.
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

    On a cluster that runs on this machine, all of them are checked. On a cluster that the run has joined,
    only the GCS is.
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
        """Describe the first controlling process found dead, or return None if all are alive.

        ``names``: the processes to check. By default, all are checked, including the GCS of a joined cluster.
        """
        for name, (pid, start) in self.processes.items():
            if name in (names or self.processes) and not process_tag.lives(pid, start):
                return (
                    f"Ray's {name} (pid {pid}) has died; without it no worker can be started and no run on pools "
                    "can continue"
                )
        return self.gcs.lost() if self.gcs is not None and not names else None
