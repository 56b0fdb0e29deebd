"""Messages with rows between processes: bytes that Ray moves, or references to shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from torch import Tensor

from rlflow.author.axis import Axis
from rlflow.author.batch import Batch
from rlflow.cluster.rpc.shared_memory import SMALL, SharedFrame, SharedInbox, SharedOutbox
from rlflow.execution.wire.column_wire import BatchFrame, unpack
from rlflow.execution.wire.row_bytes import Payload

RowMessage = Payload | SharedFrame


def size_of(row_message: RowMessage) -> int:
    """Return how many bytes a message moves from one process to the other."""
    return row_message.size if isinstance(row_message, SharedFrame) else row_message.nbytes


def inline(row_message: object) -> RowMessage | None:
    """Return ``row_message`` if it fits into a call's frame, or None if Ray must send it separately.

    References to shared memory fit, and so do messages of a few bytes.
    """
    few = isinstance(row_message, np.ndarray) and row_message.nbytes <= SMALL
    return row_message if few or isinstance(row_message, SharedFrame) else None  # type: ignore[return-value]


def _lasting(batch: Batch) -> Batch:
    """Return the batch with copies of the keys and lengths, which are needed longer than the columns."""
    data = {
        name: replace(data, lengths=data.lengths.clone()) if data.lengths is not None else data
        for name, data in batch.data.items()
    }
    return Batch(Axis(batch.axis.keys.clone(), grouped=batch.axis.grouped), data)


class RowMailbox:
    """Sends this process's rows to other processes, and opens messages with their rows."""

    def __init__(self) -> None:
        self.outbox, self.inbox = SharedOutbox(), SharedInbox()

    def message(
        self, batch: Batch, rows: Tensor | None = None, *, shared: bool, iteration: int = 0
    ) -> RowMessage:
        """Return a message with rows of a batch, for one receiver.

        ``rows``: row indices, or None for all rows. ``shared``: whether the receiver can read this process's
        shared memory. ``iteration``: the iteration that uses the rows.
        """
        frame = BatchFrame(batch, rows, narrow=True)
        at = self.outbox.write(frame, iteration) if shared and frame.nbytes > SMALL else None
        return at if at is not None else frame.written().numpy()

    def opened(self, row_messages: Sequence[RowMessage]) -> list[Batch]:
        """Return the batch in each message.

        The tensors are views, and each keeps the memory of its whole message alive. Integers may be int32
        even if the column's kind is int64. Raises OSError if shared memory can't be read.
        """
        frames = [
            self.inbox.read(row_message).numpy() if isinstance(row_message, SharedFrame) else row_message
            for row_message in row_messages
        ]
        return [_lasting(unpack(frame.data)) for frame in frames]

    def clear(self, iteration: int) -> None:
        """Free the memory of messages for this iteration and earlier ones."""
        self.outbox.clear(iteration)
        self.inbox.clear()

    def reaches(self, at: SharedFrame) -> bool:
        """Return whether this process can read another's shared memory. ``at``: a frame in that memory."""
        try:
            return len(self.opened([at])) == 1
        except OSError:
            return False
