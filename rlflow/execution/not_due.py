"""Eager calls that aren't due in an iteration: their columns are None, and they make no rows.

The errors are those of `check`, which finds them for all iterations before a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rlflow.author.batch import Batch, Data
from rlflow.author.columns import CLOCK, Kind, Level, standard_kind
from rlflow.author.source_lines import call_place
from rlflow.errors import FlowError, Problem, listed

REMEDY = "give this call the same every= and after= as the one that gives it"


def none_of(names: Mapping[str, Kind | None] | Iterable[str]) -> dict[str, Data]:
    """Return columns that are None. ``names``: their kinds by name, or just their names."""
    kinds: Mapping[str, Kind | None] = names if isinstance(names, Mapping) else dict.fromkeys(names)
    return {name: Data(kind or standard_kind(name) or Kind(Level.ROW), None) for name, kind in kinds.items()}


def without_rows(batch: Batch, names: Iterable[str] = ()) -> Batch:
    """Return what a call that makes rows from ``batch`` gives in an iteration in which it isn't due.

    There are no rows. All columns are None: those of ``batch``, except scalars, and the columns ``names``.
    """
    scalars = {name: data for name, data in batch.data.items() if data.kind.level is Level.SCALAR}
    columns = {name: kind for name, kind in batch.columns.items() if name not in scalars}
    return Batch(batch.axis.unmade(), scalars | none_of(columns) | none_of(names))


def there(batch: Batch) -> Batch:
    """Return the batch without the columns that are None."""
    return batch.drop(*(name for name, data in batch.data.items() if data.value is None))


def present(what: str, batch: Batch, needed: Iterable[str], optional: Iterable[str] = ()) -> Batch:
    """Return the batch without columns that are None. Used for calls that are due; ``what`` names the call.

    Raises FlowError if the rows weren't made, or if a column in ``needed`` that isn't in ``optional`` is
    None.
    """
    if not batch.axis.made:
        raise FlowError(
            Problem(
                "rows-not-due",
                f"{what} works on rows that nothing makes in this iteration",
                call_place(),
                found="the rows of a call that is not due",
                expected="rows in each iteration in which the call is due",
                remedy=REMEDY,
            )
        )
    spared = {*optional, *CLOCK}
    missing = [
        name for name in needed if name in batch and batch.data[name].value is None and name not in spared
    ]
    if missing:
        raise FlowError(
            Problem(
                "column-not-due",
                f"{what} reads {listed(missing)}, which is None in this iteration",
                call_place(),
                found="a column of a call that is not due",
                expected="a column that is there in each iteration in which the call is due",
                remedy=f"{REMEDY}, or make the column optional in the function that reads it",
            )
        )
    return there(batch)
