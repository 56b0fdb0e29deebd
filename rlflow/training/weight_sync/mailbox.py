"""Shared memory of one machine between ranks that have no group in common: a sender packs into a file of its
own, and whoever drives the transfer tells receivers when a bucket is there, and the sender when its place may
be taken again.

The file is unlinked as soon as all receivers have opened it (``hide``): memory goes with its last process,
however that ends.
"""

from __future__ import annotations

import os
from pathlib import Path

from torch import Tensor

from rlflow.training.weight_sync.segment import HEAD, ROOT, SharedFile, check_room
from rlflow.training.weight_sync.transport import Parcels


class Mailbox(Parcels):
    """A sender's. run: names the file, and lets the next ``open`` of the run remove what the dead have
    left."""

    def __init__(self, run: str, root: Path = ROOT) -> None:
        super().__init__()
        self.run, self.root, self.place = run, root, SharedFile("", 0)

    def open(self, send: int, receive: int, slots: int) -> None:
        """Raises PlanError where shared memory is too small."""
        self.room = -(-send // HEAD) * HEAD
        self.place = SharedFile.named(self.run, max(slots * self.room, HEAD), self.root)
        try:
            check_room({f"process {os.getpid()}": self.place.create()})
            self._out = self.place.opened()
        except BaseException:
            self.hide()
            raise

    def outbox(self, slot: int) -> Tensor:
        """The memory into which this rank packs its messages of a slot, uint8."""
        return self._out[slot * self.room : (slot + 1) * self.room]

    def where(self, message: Tensor) -> tuple[int, int]:
        """(first byte, byte after the last) of a message within the file."""
        start = int(message.storage_offset())
        return start, start + message.numel()

    def hide(self) -> None:
        """All receivers have the file open."""
        self.place.hide()

    def close(self) -> None:
        """Give the memory back."""
        self.hide()
        super().close()
