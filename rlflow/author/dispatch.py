"""Dispatch modes: how a call's rows are split over the ranks of a pool, and how the results are merged.

DP_COMPUTE   each row goes to one data-parallel rank; results come back in the original row order
ALL          every rank gets the same arguments and returns its own value
RANK0        a single rank gets all rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Dispatch:
    """A dispatch mode: how a call's rows are split over ranks.

    ``split(batch, ranks)`` returns one batch per rank, and ``merge(outputs, batch)`` joins what the ranks
    return into one batch. Both are None for the three built-in modes, which pools implement themselves. A
    mode is printed and serialised as its name.
    """

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
    """Register a dispatch mode under ``name`` and return it.

    ``split(batch, ranks)`` returns a list with one batch per rank. ``merge(outputs, batch)`` joins the
    batches that the ranks return into one, where ``batch`` is what was split.

    Raises ValueError if another mode has this name.
    """
    mode = Dispatch(name, split, merge)
    if name in MODES and (MODES[name].split, MODES[name].merge) != (split, merge):
        raise ValueError(
            f"register_dispatch: the mode '{name}' exists; choose a name other than {', '.join(MODES)}"
        )
    return MODES.setdefault(name, mode)
