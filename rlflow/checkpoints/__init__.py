"""Checkpoints: what a run needs to go on, written so that a crash at any moment leaves the last good one, and read so that a damaged
one is never taken for it. Nothing at rest is a pickle.

Here: writing, verifying, loading, exporting, the lock of a run's folder.
Not here: what a run's state is and when it is saved (`rlflow.runs.state`, `rlflow.runs.loop`), files written whole (`rlflow.durable`).
"""

from __future__ import annotations

from rlflow.checkpoints.export import export
from rlflow.checkpoints.load import Loaded, load_latest, verify
from rlflow.checkpoints.lock import Lock
from rlflow.checkpoints.models import model_files
from rlflow.checkpoints.roles import role_tensors, trainer_state
from rlflow.checkpoints.snapshot import Snapshot, host_copy
from rlflow.checkpoints.writer import Writer

__all__ = [
    "Loaded", "Lock", "Snapshot", "Writer", "export", "host_copy", "load_latest", "model_files", "role_tensors", "trainer_state", "verify",
]  # fmt: skip
