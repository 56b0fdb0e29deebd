"""Reasoning-gym tasks as data, with questions drawn from a seed.

Each record includes the entry that the task's own scorer needs.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlflow.author.columns import Kind, text
from rlflow.data.fields import Record
from rlflow.data.frozen import frozen
from rlflow.data.scorer import ScorerSpec
from rlflow.errors import PlanError, listed, nearest
from rlflow.extras import ask, require

PREFIX = "reasoning_gym:"
SIZE = 1000  # number of questions if the task's parameters name no size
# where reasoning-gym's source code names a task
NAMED = re.compile(r"""^(?:DATASET_NAME\s*=|\s*register_dataset\()\s*["']([\w-]+)["']""", re.MULTILINE)
COLUMNS: dict[str, Kind] = {"entry": text}
# (task, settings) → the questions that were drawn last, because runs in one process usually use the same data
# and drawing is slow.
_LAST: dict[tuple[str, str], tuple[tuple[Record, ...], int]] = {}


def scorer(task: str, parameters: Mapping[str, Any]) -> ScorerSpec:
    """Return the spec of a reasoning-gym task's own scorer, ``score_answer``.

    It reads a row's complete reasoning-gym entry.
    """
    settings = {"task": task, "parameters": {**parameters, "size": 1, "seed": 0}}
    return ScorerSpec("reasoning_gym", ("completion", "entry"), (), settings)


def draw(task: str, parameters: Mapping[str, Any], seed: int) -> tuple[tuple[Record, ...], int]:
    """Draw ``parameters["size"]`` questions of a task from a seed.

    Returns (records, how many repeated questions were dropped). Raises PlanError for an unknown task or
    parameter.
    """
    settings = {"size": SIZE, "seed": seed, **parameters}
    key = (task, repr(sorted(settings.items())))
    if (before := _LAST.get(key)) is not None:
        return before
    entries = _make(task, settings)
    records: dict[str, Record] = {}
    for index in range(len(entries)):
        entry = entries[index]
        # Small tasks repeat half of their questions, and making a record takes longer than drawing its entry.
        if entry["question"] not in records:
            records[entry["question"]] = _record(entry, index)
    drawn = tuple(records.values()), len(entries) - len(records)
    _LAST.clear()
    _LAST[key] = drawn
    return drawn


def draw_one(task: str, parameters: Mapping[str, Any], seed: int) -> tuple[Record, ...]:
    """Draw only the first question of a task. Raises PlanError as ``draw`` does."""
    return (_record(_make(task, {"size": SIZE, "seed": seed, **parameters})[0], 0),)


def _record(entry: Mapping[str, Any], number: int) -> Record:
    answer = entry["answer"]  # None if many answers are right
    more = {"entry": json.dumps(frozen(entry), ensure_ascii=False)}
    return Record(entry["question"], "" if answer is None else str(answer), (), more, number=number)


def check_name(task: str) -> None:
    """Raise PlanError if reasoning-gym has no task of this name, or isn't installed.

    This doesn't import reasoning-gym, which would take more than a second.
    """
    ask("reasoning_gym", extra="tasks")
    if task not in (names := _names_in_source()):
        raise _unknown(task, names)


def _names_in_source() -> list[str]:
    """Return the names of all tasks, which are read from reasoning-gym's source code."""
    spec = importlib.util.find_spec("reasoning_gym")
    folders = spec.submodule_search_locations if spec else None
    texts = (file.read_text("utf-8") for folder in folders or () for file in Path(folder).rglob("*.py"))
    return sorted({name for text in texts for name in NAMED.findall(text)})


def _known(task: str) -> Any:
    """Return the class and the settings of a task."""
    tasks = require("reasoning_gym.factory", extra="tasks").DATASETS
    if task not in tasks:
        raise _unknown(task, tasks)
    return tasks[task]


def _unknown(task: str, tasks: Iterable[str]) -> PlanError:
    return PlanError.of(
        "task-unknown",
        f"no data and no reasoning-gym task is named '{task}'",
        found=task,
        expected="a file, a folder, or one of reasoning-gym's tasks",
        nearest=nearest(task, [*tasks, *(each.name for each in Path().iterdir())]),
        remedy="correct the path of the file or folder, or list the tasks: "
        "python -c 'import reasoning_gym.factory as f; print(*sorted(f.DATASETS))'",
    )


def _make(task: str, parameters: Mapping[str, Any]) -> Any:
    kind, config = _known(task)
    _check_names(task, parameters, [field.name for field in dataclasses.fields(config)])
    size = parameters["size"]
    if not (isinstance(size, int) and size >= 1):
        raise PlanError.of(
            "task-parameter",
            f"the reasoning-gym task '{task}' needs a size of at least 1",
            found=f"size = {size}",
            expected="size: an integer of at least 1",
            remedy=f"--data.size {SIZE}",
        )
    try:
        return kind(config=config(**parameters))  # validates the parameters
    # the errors with which reasoning-gym refuses values
    except (AssertionError, TypeError, ValueError) as error:
        raise PlanError.of(
            "task-parameter",
            f"reasoning-gym refuses the parameters of '{task}': {error or type(error).__name__}",
            found=str(dict(parameters)),
            expected=f"values for {config.__name__}",
            remedy="correct the --data.NAME with which the parameter is set",
        ) from error


def _check_names(task: str, parameters: Mapping[str, Any], names: list[str]) -> None:
    for name in parameters:
        if name not in names:
            raise PlanError.of(
                "task-parameter",
                f"the reasoning-gym task '{task}' has no parameter '{name}'",
                found=name,
                expected=listed(names),
                nearest=nearest(name, names),
                remedy=f"leave out --data.{name}, or write the name that you mean",
                setting=f"data.{name}",
            )
