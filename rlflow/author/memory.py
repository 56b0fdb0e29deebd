"""What a flow keeps from one iteration to the next: the values of ``@flow(keeps=…)``.

A flow gets a parameter for each table, which it reads and writes, and for each buffer, from which it draws rows
and into which it puts rows. `rlflow.execution.memory` stores the values.
A role that follows another keeps its weights: it has its own trainer, as any role.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlflow.author.columns import PROMPT_ID, row
from rlflow.author.schedule import CallSchedule
from rlflow.author.source_lines import call_place
from rlflow.errors import FlowError, Problem

NUMBER = row("float32")  # the kind of a table's columns
LARGEST = 3.4028234663852886e38  # of the numbers that float32 can hold
OLDEST = "oldest"
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
class Follow:
    """A role whose weights move towards those of another role: (1 - mix) × own + mix × other's.

    They move at the end of iterations in which the other role took an optimizer step, and in which they are
    due: by ``schedule``, or if the bool scalar ``when`` is True.
    """

    role: str  # the role that is followed
    schedule: CallSchedule
    when: str | None  # column that decides instead of the schedule
    mix: float  # above 0, at most 1; 1 copies the weights

    def __str__(self) -> str:
        way = "a copy of" if self.mix == 1 else f"{self.mix:g} of the way towards"
        return f"{way} {self.role}, {f'when {self.when}' if self.when else self.schedule}"


@dataclass(frozen=True)
class Reducer:
    """How a table combines the rows that an iteration writes for one key with the key's old number."""

    rule: Rule
    rate: float = 0.0  # of "ema": the share of the old number that stays

    def __str__(self) -> str:
        return f"ema({self.rate:g})" if self.rule == "ema" else self.rule


@dataclass(frozen=True)
class Buffer:
    """Rows of earlier iterations, with a bound on their number. Exactly one of the bounds is set."""

    groups: int | None = None  # bound on the number of groups, which are stored and drawn whole
    rows: int | None = None  # bound on the number of rows, which are stored and drawn one by one
    max_age: int | None = None  # iterations since a row was sampled, after which it is evicted
    # which rows leave when the buffer is full: "oldest", or a stored column, whose lowest values leave first
    evict: str = OLDEST

    @property
    def bound(self) -> int:
        """The largest number of groups, or of rows."""
        return self.groups or self.rows or 0

    @property
    def unit(self) -> Literal["groups", "rows"]:
        """What the buffer counts, draws and evicts as a whole."""
        return "groups" if self.groups else "rows"

    def __str__(self) -> str:
        age = "" if self.max_age is None else f", for {self.max_age} iterations"
        first = (
            "the oldest leave first" if self.evict == OLDEST else f"the lowest '{self.evict}' leaves first"
        )
        return f"a buffer of {self.bound} {self.unit}{age}, {first}"


Stored = Table | Buffer
Kept = Stored | Follow  # what ``@flow(keeps=…)`` may declare


REDUCERS = {name: Reducer(name) for name in ("add", "last", "max", "min", "set")}


def table(key: str = PROMPT_ID, **columns: float) -> Table:
    """Declare a table that a flow keeps: float32 numbers for each value of an int64 row column.

    ``key``: the column with each row's key, but not ``group``, whose numbers mean nothing in other
    iterations. ``columns``: name → number of a key that was never written. Raises FlowError for another key,
    if there are no columns, or if a default isn't a finite number.
    """
    wrong = {name: value for name, value in columns.items() if not _is_number(value)}
    if not isinstance(key, str) or key == "group" or not columns or wrong:
        raise FlowError(
            Problem(
                "keeps-table",
                "a table needs a key column that means the same in each iteration, and numbers as defaults",
                call_place(),
                found=f"table({', '.join([repr(key), *(f'{n}={v!r}' for n, v in columns.items())])})",
                expected='table(key="prompt_id", wins=0.0, tries=0.0)',
                remedy="give each column the number that a key has before anything writes it",
            )
        )
    return Table(key, tuple((name, float(value)) for name, value in columns.items()))


def buffer(
    *, groups: int | None = None, rows: int | None = None, max_age: int | None = None, evict: str = OLDEST
) -> Buffer:
    """Declare a buffer that a flow keeps: rows of earlier iterations.

    ``groups`` or ``rows``: the largest number of groups or of rows. With ``groups``, groups are stored, drawn
    and evicted whole. ``max_age``: rows leave when they are older than this number of iterations. ``evict``:
    what leaves when the buffer is full, "oldest" or a stored column, whose lowest values leave first. A group's
    value is the mean of its rows' values, and NaN counts as the lowest. Raises FlowError unless exactly one
    bound is given, and all numbers are 1 or more.
    """
    numbers = [value for value in (groups, rows, max_age) if value is not None]
    whole = all(isinstance(value, int) and not isinstance(value, bool) and value >= 1 for value in numbers)
    if (groups is None) == (rows is None) or not whole or not isinstance(evict, str) or not evict:
        given = {"groups": groups, "rows": rows, "max_age": max_age}
        shown = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        raise FlowError(
            Problem(
                "keeps-buffer",
                "a buffer needs a bound: a number of groups or a number of rows",
                call_place(),
                found=f"buffer({', '.join([*shown, f'evict={evict!r}'])})",
                expected='buffer(groups=64), or buffer(rows=512, max_age=8, evict="oldest")',
                remedy="give either groups or rows, and only whole numbers from 1 on",
            )
        )
    return Buffer(groups, rows, max_age, evict)


def follow(
    role: str, *, every: int | None = None, after: int = 0, when: str | None = None, mix: float = 1.0
) -> Follow:
    """Declare a role whose weights follow another role's: weights = (1 - mix) × weights + mix × other's.

    ``role``: the name of a role that the flow updates. The weights move after its last update in an
    iteration, if it took an optimizer step. ``every``, ``after``: in iterations after, after + every, and so
    on, counted from 0; by default, in each. ``when``: instead of these two, the name of a bool scalar column or
    of a state: in iterations in which it is True. ``mix``: above 0 and at most 1; 1 copies the weights. Raises
    FlowError for other values.
    """
    of_schedule = (every is None or _is_count(every, 1)) and _is_count(after, 0)
    alone = when is None or (isinstance(when, str) and bool(when) and every is None and after == 0)
    names = isinstance(role, str) and bool(role)
    if not names or not of_schedule or not alone or not _is_number(mix) or not 0 < mix <= 1:
        raise FlowError(
            Problem(
                "keeps-follow",
                "a role follows another on a schedule or when a column says so, by a share of the way",
                found=f"follow({role!r}, every={every!r}, after={after!r}, when={when!r}, mix={mix!r})",
                expected='follow("actor", every=16, mix=0.6), or follow("actor", when="stalled")',
                remedy="give every= of at least 1 and after= of at least 0, or when=; and mix= above 0 and at "
                "most 1",
            )
        )
    return Follow(role, CallSchedule(every or 1, after), when, float(mix))


def stores(kept: Mapping[str, Kept]) -> dict[str, Stored]:
    """Return the tables and buffers among the things that a flow keeps, by name."""
    return {name: spec for name, spec in kept.items() if isinstance(spec, Stored)}


def follows(kept: Mapping[str, Kept]) -> dict[str, Follow]:
    """Return the roles that follow another among the things that a flow keeps, by name."""
    return {name: spec for name, spec in kept.items() if isinstance(spec, Follow)}


def ema(rate: float) -> Reducer:
    """Return the reducer of a moving average: ``rate`` × old number + (1 - ``rate``) × mean of the key's rows.

    A key takes one step per iteration, however many rows it has. Raises FlowError unless 0 ≤ ``rate`` < 1.
    """
    if not _is_number(rate) or not 0 <= rate < 1:
        raise FlowError(
            Problem(
                "keeps-ema",
                "a moving average keeps a share of its old number",
                call_place(),
                found=f"ema({rate!r})",
                expected="0 or more, and less than 1",
                remedy="write ema(0.95) to keep 95 % of the old number in each iteration",
            )
        )
    return Reducer("ema", float(rate))


def _is_number(value: Any) -> bool:
    """Return True for a number that float32 can hold."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and abs(value) <= LARGEST
    )


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
