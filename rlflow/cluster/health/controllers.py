"""The controlling processes of a Ray that a run has started. They are watched here, since Ray itself reports
the death of one late: it looks for it for a minute, and then ends the processes that are connected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.cluster.reach import Listening
from rlflow.processes.watchdog import kin

RAYLET = "raylet"  # starts workers and holds objects; when it ends, they end too
GCS = "gcs_server"  # knows which worker is where


@dataclass(frozen=True)
class Controllers:
    """The controlling processes of a Ray: those of a local one, or where the GCS of one that was joined
    listens."""

    # name → (pid, start); none of a Ray that was joined
    processes: Mapping[str, kin.Known] = field(default_factory=dict)
    gcs: Listening | None = None  # of a Ray that was joined at an address

    @classmethod
    def of_this_process(cls) -> Controllers:
        """The controllers of the Ray that this process has just started."""
        names = {
            process: os.path.basename(kin.command(process[0])) for process in kin.descendants(os.getpid())
        }
        return cls({name: process for process, name in names.items() if name in (RAYLET, GCS)})

    def lost(self, *names: str) -> str | None:
        """A text that says which of the named controllers (without names: of all) has died; None where none
        has. Without names the GCS of a Ray that was joined counts too."""
        for name, (pid, start) in self.processes.items():
            if name in (names or self.processes) and not kin.lives(pid, start):
                return (
                    f"Ray's {name} (pid {pid}) has died, without which no worker can be started and "
                    "no run on pools goes on"
                )
        return self.gcs.lost() if self.gcs is not None and not names else None
