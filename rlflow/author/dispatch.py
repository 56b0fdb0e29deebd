"""Dispatch modes: how the rows of a call are split over the data-parallel ranks of a pool, and how results
are merged.

DP_COMPUTE   every row goes to exactly one rank; outputs come back in the original row order
ALL          every rank runs with the same arguments and gives one value each
RANK0        one rank runs with all rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dispatch:
    """A mode. ``split(batch, ranks)`` gives one batch per rank, ``merge(outputs, batch)`` the batch of their
    results; None where the mode is one of the three built in, which pools know. Prints and serialises as its
    name."""

    name: str
    split: Callable[[Any, int], Any] | None = None
    merge: Callable[[Any, Any], Any] | None = None

    def __str__(self) -> str:
        return self.name


DP_COMPUTE = Dispatch("DP_COMPUTE")
ALL = Dispatch("ALL")
RANK0 = Dispatch("RANK0")
MODES: dict[str, Dispatch] = {mode.name: mode for mode in (DP_COMPUTE, ALL, RANK0)}


def register_dispatch(
    name: str, split: Callable[[Any, int], Any], merge: Callable[[Any, Any], Any]
) -> Dispatch:
    """Add a dispatch mode: ``split(batch, ranks) -> [batch, …]`` and ``merge([outputs, …], batch) -> batch``,
    where each of the outputs is the batch that a rank gave for its rows.

    Raises ValueError for a name that is taken by another mode.
    """
    mode = Dispatch(name, split, merge)
    if name in MODES and (MODES[name].split, MODES[name].merge) != (split, merge):
        raise ValueError(
            f"register_dispatch: the mode '{name}' exists; choose another name than {', '.join(MODES)}"
        )
    return MODES.setdefault(name, mode)
