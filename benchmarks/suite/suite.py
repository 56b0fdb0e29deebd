"""Suites: the cells that are compared, their seeds, and the number of iterations in a turn.

A suite is a TOML file:

[suite]                          # see Settings for all names
seeds = 3
block = 4
[base]                           # flags of `rlflow run` for every cell
algorithm = "grpo"
[axis]                           # lists of values; the cells are all combinations
staleness = [0, 1]
[[cell]]                         # one cell; with [axis], the cell is run with every combination
name = "two pools"
pools = "train=1,rollout=1"
[goal]
metric = "evaluation/sampled"
reach = 0.85
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rlflow.config.flags import flat
from rlflow.errors import PlanError, Problem, listed, nearest

SHIPPED = Path(__file__).parent / "suites"
RLFLOW = "rlflow"  # the default system of a cell
OWN = ("algorithm", "system", "name")  # keys of a cell that are not passed on as flags of `rlflow run`
# flags that a cell may not set → the setting or flag to use instead
OF_BENCH = {"seed": "[suite] seeds", "out": "--out", "json": "--json", "quiet": "nothing"}

Positive = Annotated[int, Field(ge=1)]
Table = TypeVar("Table", bound=BaseModel)


class Settings(BaseModel):
    """The table [suite] of a suite's file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    # the number of seeds, counted from 0, or a list of seeds
    seeds: Positive | Annotated[list[int], Field(min_length=1)] = 1
    block: Positive = 3  # iterations in one turn of a cell
    # iterations at the start of each turn that are run but not timed
    settle: Annotated[int, Field(ge=0)] = 1
    # maximum number of turns of each cell; None: cells run all their iterations
    rounds: Positive | None = None
    # maximum number of seconds to prepare a cell, and for one turn
    deadline: Annotated[float, Field(gt=0)] = 900.0
    base: str | None = None  # the cell that the others are compared with; None: the first cell
    # a Python file next to the suite; it is run once with a folder to fill, and {made} in flags names the folder
    make: str | None = None


class Goal(BaseModel):
    """The table [goal] of a suite's file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    metric: str = "evaluation/sampled"  # a metric of metrics.jsonl; a larger value is better
    reach: float | None = None  # target value of the metric; cells are compared by the time to reach it
    # cells that differ by less count as equal: relative for seconds, absolute for the metric
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.05


class Gate(BaseModel):
    """One [[gate]] table: a value of a cell that must stay within the range of its trusted runs."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    metric: str  # seconds, processor, moved, memory or rate, as in the results table, or a metric's name
    cell: str | None = None  # None: every cell
    # None: lower is better for seconds, processor, moved and memory, higher for everything else
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True)
class Cell:
    """One cell of a suite: a system with its settings."""

    name: str
    system: str  # rlflow, the name of a shipped peer, or FILE.py
    algorithm: str  # for rlflow: a file or the name of a shipped algorithm
    flags: Mapping[str, Any]  # by dotted name; for rlflow the flags of `rlflow run`


@dataclass(frozen=True)
class Suite:
    """A benchmark suite, as read from its file."""

    name: str
    settings: Settings
    goal: Goal
    gates: tuple[Gate, ...]
    cells: tuple[Cell, ...]  # all cells; the first is the base, with which the others are compared
    maker: Path | None = None  # the file of [suite] make

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds. Every cell runs once with each seed."""
        seeds = self.settings.seeds
        return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


def find_suite(name: str) -> Path:
    """Return the file of a suite. ``name``: a path, or the name of a suite that comes with rlflow.

    Raises PlanError for an unknown name.
    """
    path = Path(name).expanduser()
    shipped = {file.stem: file for file in sorted(SHIPPED.glob("*.toml"))}
    if path.is_file() or path.suffix:
        return path
    if name in shipped:
        return shipped[name]
    raise PlanError.of(
        "suite",
        f"there is no suite '{name}'",
        found=name,
        expected=f"a TOML file, or one of {listed(shipped)}",
        nearest=nearest(name, shipped),
        remedy="name a file or a shipped suite",
    )


def read_suite(path: Path) -> Suite:
    """Read a suite from its file.

    Raises PlanError for invalid TOML, unknown names, values out of range and cells with the same name.
    """
    table = _toml(path)
    known = ("suite", "base", "axis", "cell", "goal", "gate")
    if unknown := [name for name in table if name not in known]:
        raise PlanError.of(
            "suite",
            f"{path}: there is no table [{unknown[0]}]",
            found=listed(unknown),
            expected=f"one of {listed(known)}",
            nearest=nearest(unknown[0], known),
            remedy="write the flags of all cells under [base]",
        )
    settings, goal = (
        _parsed(path, "suite", Settings, table.get("suite", {})),
        _parsed(path, "goal", Goal, table.get("goal", {})),
    )
    gates = tuple(_parsed(path, "gate", Gate, gate) for gate in _tables(path, table, "gate"))
    if settings.block <= settings.settle:
        raise PlanError.of(
            "suite",
            f"{path}: no iteration of a turn is timed",
            found=f"block = {settings.block}, settle = {settings.settle}",
            expected="block larger than settle",
            remedy=f"set block = {settings.settle + 1} or more",
        )
    cells = _cells(path, table, settings)
    if (base := settings.base) is not None:
        if base not in (names := [cell.name for cell in cells]):
            raise PlanError.of(
                "suite",
                f"{path}: [suite] base names an unknown cell",
                found=base,
                expected=f"one of {listed(names)}",
                nearest=nearest(base, names),
                remedy="use the name of a [[cell]], or its axis values such as 'staleness=1'",
            )
        cells.sort(key=lambda cell: cell.name != base)
    _known_cells(path, gates, cells)
    maker = path.parent / settings.make if settings.make else None
    if maker is not None and not maker.is_file():
        raise PlanError.of(
            "suite",
            f"{path}: [suite] make names a file that does not exist",
            found=str(maker),
            expected="a Python file",
            remedy="write the path relative to the suite's folder",
        )
    return Suite(path.stem, settings, goal, gates, tuple(cells), maker)


def with_files(suite: Suite, folder: Path) -> Suite:
    """Return the suite with ``folder`` in place of {made} in its flags."""

    def put(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return type(value)(map(put, value))
        return value.replace("{made}", str(folder)) if isinstance(value, str) else value

    cells = (
        replace(cell, flags={name: put(value) for name, value in cell.flags.items()}) for cell in suite.cells
    )
    return replace(suite, cells=tuple(cells))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        close = (
            nearest(path.name, [file.name for file in path.parent.glob("*.toml")])
            if path.parent.is_dir()
            else None
        )
        raise PlanError.of(
            "suite",
            f"the suite '{path}' cannot be read",
            found=str(error.strerror),
            expected="a TOML file",
            nearest=close,
            remedy="name an existing file",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError.of(
            "suite",
            f"the suite '{path}' is not TOML",
            found=str(error),
            expected="TOML",
            remedy="correct the line",
        ) from error


def _parsed(path: Path, name: str, kind: type[Table], values: Any) -> Table:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        problems = []
        for fault in error.errors():
            key = str(fault["loc"][0]) if fault["loc"] else ""
            known, text = key in kind.model_fields or not key, repr(fault.get("input"))
            problems.append(
                Problem(
                    "suite",
                    f"{path}: [{name}] {key} cannot be used",
                    found=text if known else f"{key} = {text}",
                    expected=fault["msg"] if known else f"one of {listed(kind.model_fields)}",
                    nearest=None if known else nearest(key, kind.model_fields),
                    remedy=f"[{name}] has {listed(kind.model_fields)}",
                )
            )
        raise PlanError(*problems) from None


def _tables(path: Path, table: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the entries of an array of tables. Raises PlanError if the value is not an array of tables."""
    entries = table.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlanError.of(
            "suite",
            f"{path}: '{name}' is not a list of tables",
            found=f"{name} = {entries!r}",
            expected=f"one [[{name}]] table for each entry",
            remedy=f"write [[{name}]] with two brackets",
        )
    return entries


def _cells(path: Path, table: Mapping[str, Any], settings: Settings) -> list[Cell]:
    """Return the cells of a suite: each cell with every combination of the axes.

    Raises PlanError for an invalid table.
    """
    length = {"iterations": settings.rounds * settings.block} if settings.rounds else {}
    base, axes = {**length, **flat(table.get("base", {}))}, flat(table.get("axis", {}))
    for name, values in axes.items():
        if not isinstance(values, list | tuple) or not values:
            raise PlanError.of(
                "suite",
                f"{path}: [axis] {name} is not a list of values",
                found=repr(values),
                expected="a list with at least one value",
                remedy="write a value that all cells share under [base]",
            )
    cells = []
    for entry in _tables(path, table, "cell") or [{}]:
        for values in itertools.product(*axes.values()):
            chosen = flat(dict(zip(axes, values, strict=True)))
            cells.append(_cell(path, base | flat(entry) | chosen, flat(entry), chosen))
    names = [cell.name for cell in cells]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PlanError.of(
            "suite",
            f"{path}: two cells have the same name",
            found=twice[0],
            expected="a different name for each cell",
            remedy="give each [[cell]] its own name",
        )
    return cells


def _cell(path: Path, values: dict[str, Any], own: Mapping[str, Any], axes: Mapping[str, Any]) -> Cell:
    parts = [str(own["name"])] if "name" in own else [f"{name}={value}" for name, value in own.items()]
    name = " ".join([*parts, *(f"{axis}={value if value != '' else 'none'}" for axis, value in axes.items())])
    system = str(values.get("system", RLFLOW))
    flags = {key: value for key, value in values.items() if key not in OWN}
    # other systems do not have repeatable flags, so a tuple with one value becomes that value
    if system != RLFLOW:
        flags = {
            key: value[0] if isinstance(value, tuple) and len(value) == 1 else value
            for key, value in flags.items()
        }
    if refused := [key for key in flags if key in OF_BENCH]:
        raise PlanError.of(
            "suite",
            f"{path}: cell '{name}' sets {refused[0]}",
            found=f"{refused[0]} = {flags[refused[0]]!r}",
            expected="only flags that the comparison does not set itself",
            remedy=f"remove it; use {OF_BENCH[refused[0]]} instead",
        )
    if system == RLFLOW and "algorithm" not in values:
        raise PlanError.of(
            "suite",
            f"{path}: cell '{name}' has no algorithm",
            found=f"system = {system}",
            expected='algorithm = "…"',
            remedy="write it under [base] for all cells, under [axis] or in the cell",
        )
    return Cell(name or str(values.get("algorithm", system)), system, str(values.get("algorithm", "")), flags)


def _known_cells(path: Path, gates: Iterable[Gate], cells: Iterable[Cell]) -> None:
    """Raise PlanError for a gate that names an unknown cell."""
    names = [cell.name for cell in cells]
    for gate in gates:
        if gate.cell is not None and gate.cell not in names:
            raise PlanError.of(
                "suite",
                f"{path}: the gate of {gate.metric} names an unknown cell",
                found=gate.cell,
                expected=f"one of {listed(names)}",
                nearest=nearest(gate.cell, names),
                remedy="use the name of a [[cell]], or its axis values such as 'staleness=1'",
            )
