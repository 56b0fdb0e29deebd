"""Shared memory of one machine between ranks without a common group. A sender packs into its own file. The
caller tells the receivers when a bucket is ready, and the sender when it may reuse the memory.

The file is unlinked as soon as all receivers have opened it (``hide``). The memory is freed when the last
process that uses it ends, even after a crash.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from rlflow.training.weight_sync.segment import HEAD, ROOT, SharedFile, check_room
from rlflow.training.weight_sync.transport import Parcels


class Mailbox(Parcels):
    """The memory of a sender. run: a part of the file's name; the next ``open`` of this run removes files of
    dead processes."""

    def __init__(self, run: str, root: Path = ROOT) -> None:
        super().__init__()
        self.run, self.root, self.place = run, root, SharedFile("", 0)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Make the file. Raises PlanError if shared memory is too small."""
        self.room = -(-send // HEAD) * HEAD
        self.place = SharedFile.named(self.run, max(slots * self.room, HEAD), self.root)
        try:
            check_room({f"process {os.getpid()}": self.place.create()})
            self._out = self.place.opened()
        except BaseException:
            self.hide()
            raise

    def outbox(self, slot: int) -> Tensor:
        """Return the memory into which this rank packs its messages of a slot, uint8."""
        return self._out[slot * self.room : (slot + 1) * self.room]

    def where(self, message: Tensor) -> tuple[int, int]:
        """Return the place of a message in the file: (its first byte, the byte after its last)."""
        start = int(message.storage_offset())
        return start, start + message.numel()

    def hide(self) -> None:
        """Unlink the file. Call this when all receivers have it open."""
        self.place.hide()

    def close(self) -> None:
        """Free the memory."""
        self.hide()
        super().close()
