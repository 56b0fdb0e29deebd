"""Start processes in a section as the ranks of one group."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpu.supervise import context

if TYPE_CHECKING:
    from gpu.ground import Ground


class RankError(RuntimeError):
    """A rank raised an error, died, or missed its deadline."""


def together(
    ground: Ground,
    count: int,
    target: Callable[..., Any],
    *arguments: Any,
    seconds: float = 40.0,
    dead: tuple[int, ...] = (),
) -> list[Any]:
    """Run ``target(rank, count, meeting, ground, *arguments)`` on each rank, and return the results by rank.

    ``seconds``: time limit for each rank's result. ``dead``: ranks that are expected to die without a result.
    Raises RankError.
    """
    # a forked process cannot use a GPU that its parent has used
    started: Any = context(ground.start) if ground.gpu else multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir=ground.folder) as folder:
        pipes, processes = [], []
        for rank in range(count):
            reader, writer = started.Pipe(duplex=False)
            process = started.Process(
                target=_rank, args=(writer, target, rank, count, f"{folder}/meeting", ground, arguments)
            )
            process.start()
            writer.close()
            pipes.append(reader)
            processes.append(process)
        try:
            return [_answer(rank, reader, seconds) for rank, reader in enumerate(pipes) if rank not in dead]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(writer: Connection, target: Callable[..., Any], rank: int, *arguments: Any) -> None:
    *positional, others = arguments
    try:
        writer.send((True, target(rank, *positional, *others)))
    except BaseException as error:
        traceback.print_exc()
        writer.send(
            (
                False,
                f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}",
            )
        )
    os._exit(0)


def _answer(rank: int, reader: Connection, seconds: float) -> Any:
    if not reader.poll(seconds):
        raise RankError(f"rank {rank} did not answer within {seconds:g} s")
    try:
        well, found = reader.recv()
    except EOFError:
        raise RankError(f"rank {rank} died") from None
    if not well:
        raise RankError(f"rank {rank}: {found}")
    return found


def only_rank(folder: Path, device: str) -> None:
    """Make this process the only rank of a group."""
    from rlflow.cluster.group import join

    join(str(folder / "only"), 0, 1, device)
