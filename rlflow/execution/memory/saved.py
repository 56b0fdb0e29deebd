"""What a flow keeps at the start of a run, and its saved form in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from safetensors.torch import load, save

from rlflow.compiler.graph.model import MemorySlot
from rlflow.errors import PlanError
from rlflow.execution.memory.tables import KeptTable, TablePart

Saved = dict[str, Any]  # plain JSON values


def empty(slots: Iterable[MemorySlot], lag: int) -> dict[str, KeptTable]:
    """Return what a flow keeps before its first iteration, by name.

    ``lag``: how many iterations a read may be behind.
    """
    return {slot.name: KeptTable(slot.spec, lag) for slot in slots}


def saved(memory: Mapping[str, KeptTable]) -> tuple[Saved, dict[str, bytes]]:
    """Return the saved form: plain values by name, and the contents of files by file name.

    A part's file doesn't change any more, so the next checkpoint needs to write only new parts.
    """
    state, files = {}, {}
    for name, table in memory.items():
        state[name] = {
            "columns": [column for column, _ in table.spec.columns],
            "parts": [[part.first, part.last] for part in table.parts],
        }
        for part in table.parts:
            files[_file(name, part.first, part.last)] = save({"keys": part.keys, "values": part.values})
    return state, files


def restored(
    memory: Mapping[str, KeptTable], state: Saved, files: Mapping[str, bytes]
) -> dict[str, KeptTable]:
    """Return the memory that ``saved`` returned as ``state`` and ``files``.

    ``memory``: what the flow keeps, in whatever state. Raises PlanError if a table has other columns.
    """
    return {name: _restored(name, table, state.get(name), files) for name, table in memory.items()}


def _restored(name: str, table: KeptTable, state: Saved | None, files: Mapping[str, bytes]) -> KeptTable:
    columns = [column for column, _ in table.spec.columns]
    if state is None or state["columns"] != columns:
        raise PlanError.of(
            "checkpoint-memory",
            f"the checkpoint does not have the table '{name}' of this flow",
            found=f"columns {', '.join(state['columns'])}" if state else "no such table",
            expected=f"columns {', '.join(columns)}",
            remedy="resume with the flow of the run, or start a new run",
        )
    parts = []
    for first, last in state["parts"]:
        tensors = load(files[_file(name, first, last)])
        parts.append(TablePart(first, last, tensors["keys"], tensors["values"]))
    return KeptTable(table.spec, table.lag, tuple(parts))


def _file(name: str, first: int, last: int) -> str:
    return f"{name}.{first}-{last}"
