"""What a flow keeps from one iteration to the next: the values of ``@flow(keeps=…)``.

A flow gets a parameter for each table, which it reads and writes. `rlflow.execution.memory` stores the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.author.columns import PROMPT_ID, row
from rlflow.errors import FlowError, Problem

NUMBER = row("float32")  # the kind of a table's columns
Rule = Literal["add", "last", "max", "min", "ema", "set"]


@dataclass(frozen=True)
class Table:
    """Numbers for each key, such as for each prompt, with the defaults of keys that were never written."""

    key: str  # the int64 row column that has the key of each row
    columns: tuple[tuple[str, float], ...]  # name and default of each number

    def __str__(self) -> str:
        numbers = ", ".join(f"{name} = {default:g}" for name, default in self.columns)
        return f"a table by {self.key}, at first {numbers}"


@dataclass(frozen=True)
class Reducer:
    """How a table combines the rows that an iteration writes for one key with the key's old number."""

    rule: Rule
    rate: float = 0.0  # of "ema": the share of the old number that stays

    def __str__(self) -> str:
        return f"ema({self.rate:g})" if self.rule == "ema" else self.rule


REDUCERS = {name: Reducer(name) for name in ("add", "last", "max", "min", "set")}


def table(key: str = PROMPT_ID, **columns: float) -> Table:
    """Declare a table that a flow keeps: float32 numbers for each value of an int64 row column.

    ``key``: the column with each row's key. ``columns``: name → number of a key that was never written.
    Raises FlowError if there are no columns or a default isn't a number.
    """
    wrong = {name: value for name, value in columns.items() if not _is_number(value)}
    if not isinstance(key, str) or not columns or wrong:
        raise FlowError(
            Problem(
                "keeps-table",
                "a table needs the name of its key column, and a number for each of its columns",
                found=f"table({', '.join([f'key={key!r}', *(f'{n}={v!r}' for n, v in columns.items())])})",
                expected='table(key="prompt_id", wins=0.0, tries=0.0)',
                remedy="give each column the number that a key has before anything writes it",
            )
        )
    return Table(key, tuple((name, float(value)) for name, value in columns.items()))


def ema(rate: float) -> Reducer:
    """Return the reducer of a moving average: ``rate`` × old number + (1 - ``rate``) × mean of the key's rows.

    A key takes one step per iteration, however many rows it has. Raises FlowError unless 0 ≤ ``rate`` < 1.
    """
    if not _is_number(rate) or not 0 <= rate < 1:
        raise FlowError(
            Problem(
                "keeps-ema",
                "a moving average keeps a share of its old number",
                found=f"ema({rate!r})",
                expected="0 or more, and less than 1",
                remedy="write ema(0.95) to keep 95 % of the old number in each iteration",
            )
        )
    return Reducer("ema", float(rate))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
