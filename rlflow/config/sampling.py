"""Sampling settings on the command line, which override those in the flow.

The flags are written --ROLE.generate.NAME or, for the role's second call of `generate`,
--ROLE.generate#2.NAME.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlflow.author.methods import GENERATE
from rlflow.author.settings import parse
from rlflow.errors import Problem, listed, nearest

TYPES: dict[str, Any] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "stop": tuple,
    "stop_token_ids": tuple,
    "min_tokens": int,
    "lengths": tuple,
    "skip_special_tokens": bool,
}
# settings that are tuples, with the type of their items
SEVERAL: dict[str, type] = {"stop": str, "stop_token_ids": int}
CALL = re.compile(r"generate(#[1-9]\d*)?")


def addresses_call(setting: str) -> bool:
    """Whether a role's setting is for a `generate` call, as in ``generate.stop`` or ``generate#2.top_p``."""
    return CALL.fullmatch(setting.partition(".")[0]) is not None


def repeatable(flag: str) -> bool:
    """Whether a flag may be repeated: the stop strings and stop tokens of a `generate` call."""
    _, _, setting = flag.partition(".")
    return setting.rpartition(".")[2] in SEVERAL and addresses_call(setting)


def sampling_of(values: Mapping[str, Any]) -> tuple[dict[str, dict[str, Any]], list[Problem]]:
    """Return (sampling settings by call and name, problems).

    Calls are named ``ROLE.generate``, or ``ROLE.generate#2`` for the second call. Values are converted to the
    types that `generate` takes. Each unknown name and each invalid value is a problem.
    """
    settings: dict[str, dict[str, Any]] = {}
    problems = []
    for flag, value in values.items():
        call, _, name = flag.rpartition(".")
        if name not in TYPES or not call:
            problems.append(_unknown(flag, name))
            continue
        fitting = _value(name, value)
        if fitting is None or not GENERATE[name].test(fitting):
            problems.append(_unfit(flag, name, value))
        else:
            settings.setdefault(call.removesuffix("#1"), {})[name] = fitting
    return settings, problems


def _value(name: str, value: Any) -> Any:
    """Convert a value to the type of the setting ``name``, or return None if it can't be converted."""
    if name == "lengths":
        return _lengths(value)
    try:
        if name in SEVERAL:
            return tuple(
                parse(SEVERAL[name], each)
                for each in (value if isinstance(value, list | tuple) else (value,))
            )
        return parse(TYPES[name], value)
    except ValueError:
        return None


def _lengths(value: Any) -> Any:
    """Return response lengths as a tuple, from a sequence or the key ``lengths`` of a JSON file, or None."""
    if isinstance(value, list | tuple):
        return tuple(value)
    try:
        lengths = json.loads(Path(str(value)).expanduser().read_text())["lengths"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return tuple(lengths) if isinstance(lengths, list) and lengths else None


def _unfit(flag: str, name: str, value: Any) -> Problem:
    """Return the problem for an invalid value of a sampling setting."""
    expected = (
        GENERATE[name].expected
        if name != "lengths"
        else 'a JSON file with {"lengths": [NUMBER, …]}, integers of at least 1'
    )
    remedy = (
        f"change --{flag}"
        if name != "lengths"
        else "`rlflow bench record RUN -o FILE` writes one from the rows of a run"
    )
    return Problem(
        "setting-range",
        f"--{flag} is out of range",
        found=repr(value),
        expected=f"{name}: {expected}",
        remedy=remedy,
        setting=flag,
    )


def _unknown(flag: str, name: str) -> Problem:
    close = nearest(name, TYPES)
    remedy = (
        f"write --{flag.removesuffix(name)}{close}"
        if close
        else "set samples and max_tokens in the flow, because they shape its rows"
    )
    return Problem(
        "unknown-setting",
        f"--{flag} is not a setting of `generate` that a run can change",
        found=name,
        expected=f"one of {listed(TYPES)}",
        nearest=close,
        remedy=remedy,
        setting=flag,
    )
