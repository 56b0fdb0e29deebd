"""Suites: which cells are compared, over which seeds, and in turns of how many iterations. A suite is a TOML
file:

[suite]                          # see Settings for all names
seeds = 3
block = 4
[base]                           # flags of `rlflow run` for every cell
algorithm = "grpo"
[axis]                           # lists of values; the cells are all combinations
staleness = [0, 1]
[[cell]]                         # or one by one; with [axis] each in every combination
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
RLFLOW = "rlflow"  # the system of a cell that names none
OWN = ("algorithm", "system", "name")  # names of a cell that are no flags of `run`
# flags that cells do not have → what says it
OF_BENCH = {"seed": "[suite] seeds", "out": "--out", "json": "--json", "quiet": "nothing"}

Positive = Annotated[int, Field(ge=1)]
Table = TypeVar("Table", bound=BaseModel)


class Settings(BaseModel):
    """The table [suite]."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    # a number of seeds, from 0 on, or the seeds themselves
    seeds: Positive | Annotated[list[int], Field(min_length=1)] = 1
    block: Positive = 3  # iterations of a cell in one turn
    # iterations at the beginning of a turn that are run and not timed
    settle: Annotated[int, Field(ge=0)] = 1
    # turns of each cell, at most; without it cells run to the end of their iterations
    rounds: Positive | None = None
    # seconds that a cell may take to be prepared, and for each turn
    deadline: Annotated[float, Field(gt=0)] = 900.0
    base: str | None = None  # the cell that others are compared with; the first
    # a Python file beside the suite, run once with a folder to write files to, which is {made} in flags
    make: str | None = None


class Goal(BaseModel):
    """The table [goal]."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    metric: str = "evaluation/sampled"  # a name of metrics.jsonl; a larger value is better
    reach: float | None = None  # the value whose first time is compared
    # within which cells count as the same: a share of seconds, an amount of the metric
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.05


class Gate(BaseModel):
    """A table of [[gate]]: a number of a cell that has to stay within what it was in trusted runs."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    metric: str  # seconds, processor, moved, memory or rate, as in the table, or the name of a metric
    cell: str | None = None  # None: every cell
    # None: lower of seconds, processor, moved and memory, higher of all else
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True)
class Cell:
    """One thing that is compared: a system with its settings."""

    name: str
    system: str  # rlflow, the name of a shipped peer, or FILE.py
    algorithm: str  # of rlflow: a file or the name of a shipped algorithm
    flags: Mapping[str, Any]  # by dotted name; of rlflow those of `rlflow run`


@dataclass(frozen=True)
class Suite:
    """All that a comparison is made of."""

    name: str
    settings: Settings
    goal: Goal
    gates: tuple[Gate, ...]
    cells: tuple[Cell, ...]  # the one that others are compared with is the first
    maker: Path | None = None  # the file of [suite] make

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds, each of which every cell runs once."""
        seeds = self.settings.seeds
        return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


def find_suite(name: str) -> Path:
    """The file of a suite: a path, or the name of a shipped suite. Raises PlanError."""
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
        remedy="name a file, or a suite that is shipped",
    )


def read_suite(path: Path) -> Suite:
    """A suite from its file. Raises PlanError for a file that is no TOML, unknown names, values out of range
    and cells of one name."""
    table = _toml(path)
    known = ("suite", "base", "axis", "cell", "goal", "gate")
    if unknown := [name for name in table if name not in known]:
        raise PlanError.of(
            "suite",
            f"{path}: there is no table [{unknown[0]}]",
            found=listed(unknown),
            expected=f"one of {listed(known)}",
            nearest=nearest(unknown[0], known),
            remedy="flags of all cells stand under [base]",
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
            expected="a block that is longer than that",
            remedy=f"set block = {settings.settle + 1} or more",
        )
    cells = _cells(path, table, settings)
    if (base := settings.base) is not None:
        if base not in (names := [cell.name for cell in cells]):
            raise PlanError.of(
                "suite",
                f"{path}: [suite] base names no cell",
                found=base,
                expected=f"one of {listed(names)}",
                nearest=nearest(base, names),
                remedy="cells are named by their name, or by what sets them apart",
            )
        cells.sort(key=lambda cell: cell.name != base)
    _known_cells(path, gates, cells)
    maker = path.parent / settings.make if settings.make else None
    if maker is not None and not maker.is_file():
        raise PlanError.of(
            "suite",
            f"{path}: [suite] make names no file",
            found=str(maker),
            expected="a Python file",
            remedy="name it as it is reached from the suite's folder",
        )
    return Suite(path.stem, settings, goal, gates, tuple(cells), maker)


def with_files(suite: Suite, folder: Path) -> Suite:
    """The suite with {made} in its flags replaced by a folder."""

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
            remedy="name a file that is there",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise PlanError.of(
            "suite",
            f"the suite '{path}' is not TOML",
            found=str(error),
            expected="TOML",
            remedy="correct that line",
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
    """The entries of an array of tables. Raises PlanError where it is no such array."""
    entries = table.get(name, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PlanError.of(
            "suite",
            f"{path}: '{name}' is no list of tables",
            found=f"{name} = {entries!r}",
            expected=f"[[{name}]], once for each",
            remedy=f"write [[{name}]] with two brackets",
        )
    return entries


def _cells(path: Path, table: Mapping[str, Any], settings: Settings) -> list[Cell]:
    """Every combination of the axes for every cell. Raises PlanError."""
    length = {"iterations": settings.rounds * settings.block} if settings.rounds else {}
    base, axes = {**length, **flat(table.get("base", {}))}, flat(table.get("axis", {}))
    for name, values in axes.items():
        if not isinstance(values, list | tuple) or not values:
            raise PlanError.of(
                "suite",
                f"{path}: [axis] {name} is no list",
                found=repr(values),
                expected="a list of values",
                remedy="a value that all cells share stands under [base]",
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
            f"{path}: two cells have one name",
            found=twice[0],
            expected="names that differ",
            remedy="give each [[cell]] a name of its own",
        )
    return cells


def _cell(path: Path, values: dict[str, Any], own: Mapping[str, Any], axes: Mapping[str, Any]) -> Cell:
    parts = [str(own["name"])] if "name" in own else [f"{name}={value}" for name, value in own.items()]
    name = " ".join([*parts, *(f"{axis}={value if value != '' else 'none'}" for axis, value in axes.items())])
    system = str(values.get("system", RLFLOW))
    flags = {key: value for key, value in values.items() if key not in OWN}
    if system != RLFLOW:  # has no flags that may be repeated: a value is as it was written
        flags = {
            key: value[0] if isinstance(value, tuple) and len(value) == 1 else value
            for key, value in flags.items()
        }
    if refused := [key for key in flags if key in OF_BENCH]:
        raise PlanError.of(
            "suite",
            f"{path}: cell '{name}' sets {refused[0]}",
            found=f"{refused[0]} = {flags[refused[0]]!r}",
            expected="flags that a comparison does not set itself",
            remedy=f"remove it; {OF_BENCH[refused[0]]} says it",
        )
    if system == RLFLOW and "algorithm" not in values:
        raise PlanError.of(
            "suite",
            f"{path}: cell '{name}' names no algorithm",
            found=f"system = {system}",
            expected='algorithm = "…"',
            remedy="write it under [base] for all cells, under [axis] or in the cell",
        )
    return Cell(name or str(values.get("algorithm", system)), system, str(values.get("algorithm", "")), flags)


def _known_cells(path: Path, gates: Iterable[Gate], cells: Iterable[Cell]) -> None:
    """Raises PlanError for a gate of a cell that is not there."""
    names = [cell.name for cell in cells]
    for gate in gates:
        if gate.cell is not None and gate.cell not in names:
            raise PlanError.of(
                "suite",
                f"{path}: a gate of {gate.metric} names no cell",
                found=gate.cell,
                expected=f"one of {listed(names)}",
                nearest=nearest(gate.cell, names),
                remedy="cells are named by their name, or by what sets them apart",
            )
