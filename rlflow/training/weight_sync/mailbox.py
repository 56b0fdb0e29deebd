"""Shared memory between ranks on one machine that do not have a common process group. Each sender packs its
messages into its own file. The caller informs the receivers when a bucket is ready, and the sender when it
may reuse the memory.

The file is unlinked as soon as all receivers have opened it (``hide``). The memory is therefore freed when
the last process that uses it ends, even after a crash.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from rlflow.training.weight_sync.segment import HEAD, ROOT, SharedFile, check_room
from rlflow.training.weight_sync.transport import Parcels


class Mailbox(Parcels):
    """The shared memory of one sender. run: name of the run, which becomes a part of the file name. When a
    process of the same run opens a mailbox, it removes the files of dead processes."""

    def __init__(self, run: str, root: Path = ROOT) -> None:
        super().__init__()
        self.run, self.root, self.place = run, root, SharedFile("", 0)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Create the file. send: bytes of the largest outgoing bucket. slots: number of buckets in the file.
        Raises PlanError if there is not enough shared memory."""
        self.room = -(-send // HEAD) * HEAD
        self.place = SharedFile.named(self.run, max(slots * self.room, HEAD), self.root)
        try:
            check_room({f"process {os.getpid()}": self.place.create()})
            self._out = self.place.opened()
        except BaseException:
            self.hide()
            raise

    def outbox(self, slot: int) -> Tensor:
        """Return the memory into which this rank packs the bucket of a slot, uint8."""
        return self._out[slot * self.room : (slot + 1) * self.room]

    def where(self, message: Tensor) -> tuple[int, int]:
        """Return the place of a message in the file as (first byte, byte after its last byte)."""
        start = int(message.storage_offset())
        return start, start + message.numel()

    def hide(self) -> None:
        """Unlink the file. Call this after all receivers have opened the file."""
        self.place.hide()

    def close(self) -> None:
        """Unlink the file and free the memory."""
        self.hide()
        super().close()
