"""Shared memory between ranks on one machine that have no process group in common. Each sender packs its
messages into its own file. The caller tells receivers when a bucket is ready, and the sender when it may
reuse the memory.

The file is unlinked as soon as all receivers have opened it (``hide``), so its memory is freed when the last
process using it ends, even after a crash.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from rlflow.training.weight_sync.segment import HEAD, ROOT, SharedFile, check_room
from rlflow.training.weight_sync.transport import Parcels


class Mailbox(Parcels):
    """One sender's shared memory.

    run: the name of the run, which becomes part of the file name. When a process of the same run opens a
    mailbox, it removes files left by dead processes.
    """

    def __init__(self, run: str, root: Path = ROOT) -> None:
        super().__init__()
        self.run, self.root, self.place = run, root, SharedFile("", 0)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Create the file, with space for ``slots`` buckets of up to ``send`` bytes each. Raises PlanError if
        there isn't enough shared memory."""
        self.room = -(-send // HEAD) * HEAD
        self.place = SharedFile.named(self.run, max(slots * self.room, HEAD), self.root)
        try:
            check_room({f"process {os.getpid()}": self.place.create()})
            self._out = self.place.opened()
        except BaseException:
            self.hide()
            raise

    def outbox(self, slot: int) -> Tensor:
        """Return the memory into which this rank packs the bucket in a slot, uint8."""
        return self._out[slot * self.room : (slot + 1) * self.room]

    def where(self, message: Tensor) -> tuple[int, int]:
        """Return the first byte of a message in the file, and the byte after its last."""
        start = int(message.storage_offset())
        return start, start + message.numel()

    def hide(self) -> None:
        """Unlink the file. Call this once all receivers have opened it."""
        self.place.hide()

    def close(self) -> None:
        """Unlink the file and free the memory."""
        self.hide()
        super().close()
