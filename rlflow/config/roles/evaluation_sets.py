"""The additional held-out sets of a run, given with ``--eval NAME=FILE``.

Each one is a file, folder or task that is opened like the run's data, with all records held out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlflow.config.flags import SET
from rlflow.config.options import Options
from rlflow.config.roles.opened_data import SHARED, data_settings, own_settings
from rlflow.data.data_spec import parse_source, parse_sources
from rlflow.data.dataset import Dataset
from rlflow.data.encode import Encoder
from rlflow.data.fields import FIELDS
from rlflow.data.json_fields import Wanted
from rlflow.data.source import open_data, unchanged
from rlflow.errors import PlanError

FIGURES = ("sampled", "greedy", "score")  # names of metrics; a set cannot have these names


def set_paths(options: Options, roles: Collection[str] = ()) -> dict[str, str]:
    """Return the file, folder or task of each additional held-out set, by name.

    ``roles``: the flow's roles. A set can't be named like a role, because both appear in metrics. Raises
    PlanError if a set has no name, a name that is taken, or a weight.
    """
    reserved = [*(source.name for source in parse_sources(options.data)), *FIGURES, *roles]
    paths: dict[str, str] = {}
    for written in options.eval:
        parts, source = SET.fullmatch(written), parse_source(written)
        if parts is None:
            raise PlanError.of(
                "eval-name",
                "a held-out set has no name",
                found=f"--eval {written}",
                expected="--eval NAME=FILE",
                remedy=f"--eval {Path(written).stem or 'NAME'}={written}",
            )
        name = parts[1]
        if name in (*reserved, *paths):
            raise PlanError.of(
                "eval-name",
                f"the name '{name}' of a held-out set is taken",
                found=f"--eval {written}",
                expected="a name that is not used for another set, a source of data or a role",
                remedy=f"--eval {name}_test={parts[2]}",
            )
        if source.weight is not None:
            raise PlanError.of(
                "eval-weight",
                f"the held-out set '{name}' has a weight",
                found=f"--eval {written}",
                expected="a complete file, without a weight",
                remedy=f"--eval {name}={source.path}",
            )
        paths[name] = parts[2]
    return paths


def open_sets(
    options: Options,
    values: Mapping[str, Any],
    tokenizer: str | None,
    wanted: Callable[[str], Wanted],
    roles: Collection[str] = (),
    telling: Callable[[Encoder], Encoder] = unchanged,
    opening: Callable[..., Dataset] = open_data,
) -> dict[str, Dataset]:
    """Open the additional held-out sets, and return them by name.

    ``values``: the values of ``--data.NAME``. ``tokenizer``: the folder whose tokenizer encodes the sets.
    ``wanted``: a function from a set's name to the fields that its reward may read. ``roles``: the flow's
    roles. ``telling``: as in ``open_data``. ``opening``: opens a set, as ``open_data`` does. Raises PlanError
    for a set that cannot be read or has no records.
    """
    paths = set_paths(options, roles)
    names = [*(source.name for source in parse_sources(options.data)), *paths]
    sets: dict[str, Dataset] = {}
    for name, path in paths.items():
        asked = wanted(name)
        settings: dict[str, Any] = data_settings(own_settings(_of_files(values), name, names), (), asked)
        opened = opening(
            path,
            tokenizer=tokenizer,
            wanted=asked,
            bad=options.bad_records,
            telling=telling,
            evaluates=True,
            **settings,
        )
        sets[name] = replace(opened, numbered=True)
    for name, data in sets.items():
        if not len(data):
            raise PlanError.of(
                "data-empty",
                f"the held-out set '{name}' has no records",
                found=data.name,
                expected="one record or more",
                remedy="write records to it, or leave the set out",
            )
    return sets


def _of_files(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data settings that apply to held-out sets.

    These are settings for a single set (dotted names), and settings that any file can have. Parameters of
    reasoning-gym tasks are left out.
    """
    return {
        key: value for key, value in values.items() if "." in key or key in (*SHARED, *FIELDS, "max_prompt")
    }
