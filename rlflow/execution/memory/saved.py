"""What a flow keeps at the start of a run, and its saved form in checkpoints."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from safetensors.torch import load, save

from rlflow.author.memory import Buffer
from rlflow.author.node_options import DrawOptions
from rlflow.compiler.graph.model import MemorySlot, Node, Op
from rlflow.errors import PlanError
from rlflow.execution.engine import Engine, KeptMemory
from rlflow.execution.memory.buffers import KeptBuffer
from rlflow.execution.memory.saved_buffers import restored_buffer, saved_buffer
from rlflow.execution.memory.tables import KeptTable, TablePart

Saved = dict[str, Any]  # plain JSON values


def empty(slots: Iterable[MemorySlot], lag: int, nodes: Iterable[Node] = ()) -> dict[str, KeptMemory]:
    """Return what a flow keeps before its first iteration, by name.

    ``lag``: how many iterations a read may be behind. ``nodes``: those of the flow, whose draws say which
    numbers of a row a buffer needs.
    """
    draws = [(node.memory, node.options(DrawOptions)) for node in nodes if node.op is Op.DRAW]
    return {
        slot.name: KeptBuffer.empty(
            slot.spec,
            [
                name
                for memory, options in draws
                for name in (options.weight, options.strata)
                if memory == slot.name and name is not None
            ],
        )
        if isinstance(slot.spec, Buffer)
        else KeptTable(slot.spec, lag)
        for slot in slots
    }


def saved(memory: Mapping[str, KeptMemory], engine: Engine) -> tuple[Saved, dict[str, bytes]]:
    """Return the saved form: plain values by name, and the contents of files by file name.

    A part's file doesn't change any more, so the next checkpoint needs to write only new parts.
    """
    state: Saved = {}
    files: dict[str, bytes] = {}
    for name, table in memory.items():
        if isinstance(table, KeptBuffer):
            state[name], rows = saved_buffer(name, table, engine)
            files |= rows
            continue
        state[name] = {
            "columns": [column for column, _ in table.spec.columns],
            "parts": [[part.first, part.last] for part in table.parts],
        }
        for part in table.parts:
            files[_file(name, part.first, part.last)] = save({"keys": part.keys, "values": part.values})
    return state, files


def on_engine(memory: Mapping[str, KeptMemory], engine: Engine) -> dict[str, KeptMemory]:
    """Return what a flow keeps, with the rows of buffers stored anew after workers were lost."""
    return {name: kept.on(engine) if isinstance(kept, KeptBuffer) else kept for name, kept in memory.items()}


def pack(memory: Mapping[str, KeptMemory], engine: Engine) -> None:
    """Pack the rows of all buffers into bytes, so that they survive the workers that store them.

    Rows that were packed before are skipped.
    """
    for kept in memory.values():
        for put in kept.puts if isinstance(kept, KeptBuffer) else ():
            put.packed(engine)


def restored(
    memory: Mapping[str, KeptMemory], state: Saved, files: Mapping[str, bytes], engine: Engine
) -> dict[str, KeptMemory]:
    """Return the memory that ``saved`` returned as ``state`` and ``files``.

    ``memory``: gives the name and declaration of each table and buffer. A table that was not saved, which only a fork can have,
    is empty. Raises PlanError if a table has other columns.
    """
    return {
        name: restored_buffer(name, kept, state.get(name), files, engine)
        if isinstance(kept, KeptBuffer)
        else _restored(name, kept, state.get(name), files)
        for name, kept in memory.items()
    }


def _restored(name: str, table: KeptTable, state: Saved | None, files: Mapping[str, bytes]) -> KeptTable:
    columns = [column for column, _ in table.spec.columns]
    if state is None:
        return KeptTable(table.spec, table.lag)
    if state["columns"] != columns:
        raise PlanError.of(
            "checkpoint-memory",
            f"the table '{name}' in the checkpoint has other columns than in this flow",
            found=f"columns {', '.join(state['columns'])}",
            expected=f"columns {', '.join(columns)}",
            remedy="declare these columns, or give the table another name, so that it starts empty",
        )
    parts = []
    for first, last in state["parts"]:
        tensors = load(files[_file(name, first, last)])
        parts.append(TablePart(first, last, tensors["keys"], tensors["values"]))
    return KeptTable(table.spec, table.lag, tuple(parts))


def _file(name: str, first: int, last: int) -> str:
    return f"{name}.{first}-{last}"
