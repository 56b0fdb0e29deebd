"""The processes by which a Ray lives that a run has started. Where one of them dies Ray says so late: it looks for it for a minute, and
then ends whoever is connected."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlflow.watchdog import kin

RAYLET, GCS = "raylet", "gcs_server"  # starts workers and holds objects, ends with all of them; knows who is where


@dataclass(frozen=True)
class Controllers:
    """``processes``: by name; none of a Ray that was joined, which is others' affair."""

    processes: Mapping[str, kin.Known] = field(default_factory=dict)

    @classmethod
    def of_this_process(cls) -> Controllers:
        """Of the Ray that was just started here."""
        names = {known: os.path.basename(kin.command(known[0])) for known in kin.descendants(os.getpid())}
        return cls({name: known for known, name in names.items() if name in (RAYLET, GCS)})

    def lost(self, *names: str) -> str | None:
        """In words which of these has died, or of all."""
        for name, (pid, started) in self.processes.items():
            if name in (names or self.processes) and not kin.lives(pid, started):
                return f"Ray's {name} (pid {pid}) has died, without which no worker can be started and no run on pools goes on"
        return None
