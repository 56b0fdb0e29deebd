"""The saved form of a buffer: a file for the rows of each put, and a small file about all rows.

The file of a put never changes, and is named by its content. So a checkpoint only writes the rows that are new
(see `rlflow.checkpoints.unchanged`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from safetensors.torch import load, save

from rlflow.errors import PlanError, listed
from rlflow.execution.account import Count
from rlflow.execution.memory.buffers import BufferTotals, KeptBuffer, PutRows, RowEntries

if TYPE_CHECKING:
    from rlflow.execution.engine import Engine

SavedBuffer = tuple[dict[str, Any], dict[str, bytes]]  # plain JSON values, and file contents by name


def saved_buffer(name: str, buffer: KeptBuffer, engine: Engine) -> SavedBuffer:
    """Return the saved form of the buffer ``name``. Rows that were packed before need no worker."""
    puts = [(put, put.packed(engine)) for put in buffer.puts]
    files = {_file(name, put.iteration, payload): payload for put, payload in puts}
    entries = {each.name: getattr(buffer.entries, each.name).contiguous() for each in fields(RowEntries)}
    state = {
        "buffer": str(buffer.spec),
        "names": list(buffer.names),
        "puts": [[put.iteration, put.pool, _file(name, put.iteration, payload)] for put, payload in puts],
        "totals": {cause: list(count) for cause, count in vars(buffer.totals).items()},
        "rows_put": buffer.rows_put,
        "units_put": buffer.units_put,
    }
    return state, files | {f"{name}.rows": save(entries)}


def restored_buffer(
    name: str, buffer: KeptBuffer, state: Mapping[str, Any] | None, files: Mapping[str, bytes], engine: Engine
) -> KeptBuffer:
    """Return the buffer that ``saved_buffer`` returned as ``state`` and ``files``, with its rows on the engine.

    ``buffer``: the buffer of the flow, in whatever state. A buffer that was not saved, which only a fork can
    have, is empty. Raises PlanError if the saved buffer is another one.
    """
    if state is None:
        return KeptBuffer.empty(buffer.spec, buffer.names)
    if (state["buffer"], state["names"]) != (str(buffer.spec), list(buffer.names)):
        raise PlanError.of(
            "checkpoint-memory",
            f"the checkpoint has another buffer '{name}' than this flow",
            found=f"{state['buffer']}; it draws by {listed(state['names'])}",
            expected=f"{buffer.spec}; it draws by {listed(buffer.names)}",
            remedy="declare this buffer, or give yours another name, so that it starts empty",
        )
    puts = [PutRows.opened(engine, iteration, pool, files[file]) for iteration, pool, file in state["puts"]]
    return KeptBuffer(
        buffer.spec,
        buffer.names,
        tuple(puts),
        RowEntries(**load(files[f"{name}.rows"])),
        BufferTotals(**{cause: Count(*counts) for cause, counts in state["totals"].items()}),
        state["rows_put"],
        state["units_put"],
    )


def _file(name: str, iteration: int, payload: bytes) -> str:
    return f"{name}.{iteration}-{hashlib.sha256(payload).hexdigest()[:16]}"
