"""The methods of model roles: their settings, and the columns that they read and return."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from rlflow.author.columns import standard_kind
from rlflow.author.schedule import CallSchedule
from rlflow.author.signature import REQUIRED
from rlflow.author.words import setting_meant
from rlflow.errors import FlowError, Place, Problem, listed


@dataclass(frozen=True)
class Setting:
    """A setting of a method: its default, a test for valid values, and how messages describe these."""

    default: Any
    test: Callable[[Any], bool]
    expected: str


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


MEANS = ("tokens", "rows", "row-tokens")
COUNT = "an integer of at least 1"
SCHEDULE = {  # settings of calls that say in which iterations they are due
    "every": Setting(1, _count, COUNT),
    "after": Setting(0, _whole, "a number of iterations, at least 0"),
}
GENERATE = {
    "samples": Setting(1, _count, COUNT),
    "max_tokens": Setting(REQUIRED, _count, COUNT),
    "temperature": Setting(1.0, lambda v: _number(v) and v >= 0, "a number of at least 0 (0 is greedy)"),
    "top_p": Setting(1.0, lambda v: _number(v) and 0 < v <= 1, "a number above 0 and at most 1 (1 is off)"),
    "top_k": Setting(0, _whole, "an integer of at least 0 (0 is off)"),
    "stop": Setting(
        (),
        lambda v: isinstance(v, tuple | list) and all(isinstance(s, str) and s for s in v),
        "a tuple of strings",
    ),
    "stop_token_ids": Setting(
        (), lambda v: isinstance(v, tuple | list) and all(map(_whole, v)), "a tuple of token ids"
    ),
    "min_tokens": Setting(0, _whole, "an integer of at least 0 (0 is off)"),
    "lengths": Setting(
        (),
        lambda v: isinstance(v, tuple | list) and all(map(_count, v)),
        "a tuple of integers of at least 1 (() is off)",
    ),
    "skip_special_tokens": Setting(False, lambda v: isinstance(v, bool), "True or False"),
}
# a graph omits these settings if they are off
OFF = ("stop_token_ids", "min_tokens", "lengths", "skip_special_tokens")
COMPUTED = ("temperature", "top_p")  # settings of `generate` that may be a scalar column
UPDATE = {
    "epochs": Setting(1, _count, COUNT),
    "minibatch": Setting(None, lambda v: v is None or _count(v), COUNT + ", or None for all rows"),
    "mean": Setting(
        "tokens",
        lambda v: v in MEANS or (_number(v) and v > 0),
        '"tokens", "rows", "row-tokens" or a number above 0',
    ),
    **SCHEDULE,
    "fresh_optimizer": Setting(
        None, lambda v: v is None or isinstance(v, str), "the name of a bool column, or None"
    ),
}
JOINT = UPDATE | {  # settings of an update with several losses in one step
    "mean": Setting(
        "tokens",
        lambda v: all(UPDATE["mean"].test(each) for each in (v if isinstance(v, tuple | list) else (v,))),
        'one of "tokens", "rows", "row-tokens" or a number above 0, for all losses, or a tuple with one '
        "for each loss",
    ),
    "scale": Setting(
        None,
        lambda v: v is None or (isinstance(v, tuple | list) and all(map(_number, v))),
        "a tuple with one number for each loss",
    ),
    "where": Setting(
        None,
        lambda v: (
            v is None or (isinstance(v, tuple | list) and all(n is None or isinstance(n, str) for n in v))
        ),
        "a tuple with one entry for each loss: the name of a bool column, or None for all rows",
    ),
}
REPEAT = {"groups": Setting(REQUIRED, _count, COUNT), "tries": Setting(REQUIRED, _count, COUNT)}

GENERATE_GIVES = (
    "tokens",
    "mask",
    "completion",
    "finish",
    "sampled_logprobs",
    "temperature",
    "policy_version",
)
# `generate` also gives these columns if the role acts in an environment
EPISODE_GIVES = ("turn", "turn_rewards", "turns", "said", "failed", "episode", "episode_score")
OF_EPISODES = ("said", "failed", "episode_score")  # the columns of EPISODE_GIVES that rewards read
MODEL_READS = ("prompt_tokens", "tokens")
METHODS = ("generate", "logprobs", "values", "update")
DEADLINES = {"generate": 1800.0, "update": 1800.0, "logprobs": 600.0, "values": 600.0, "reward": 600.0}
KINDS = {
    name: standard_kind(name)
    for name in ("prompt_tokens", *GENERATE_GIVES, "group", "logprobs", "entropy", "values", "scores")
}


def bind(
    what: str, specification: Mapping[str, Setting], settings: Mapping[str, Any], place: Place | None = None
) -> dict[str, Any]:
    """Check the settings of a method call and fill in the defaults.

    ``what`` names the call in messages. All unknown, missing and out-of-range settings are raised together,
    as one FlowError.
    """
    bound, problems = checked(what, specification, settings, place)
    FlowError.refuse(problems)
    return bound


def checked(
    what: str, specification: Mapping[str, Setting], settings: Mapping[str, Any], place: Place | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Check the settings of a method call. Returns settings to continue tracing with, and the problems found.

    A missing or bad value is replaced with the setting's default, or with 1 if it has none. The value of an
    unknown setting goes to the setting that was probably meant. ``what`` names the call in messages.
    """
    problems = [
        unknown_setting(what, name, specification, place) for name in settings if name not in specification
    ]
    settings = {problem.nearest: settings[problem.found] for problem in problems if problem.nearest} | dict(
        settings
    )
    bound = {}
    for name, setting in specification.items():
        value = bound[name] = settings.get(name, setting.default)
        if value is REQUIRED:
            problems.append(missing_setting(what, name, setting.expected, place))
        elif not setting.test(value):
            problems.append(
                Problem(
                    "setting-range",
                    f"{what} has a setting that is out of range",
                    place,
                    found=f"{name}={value!r}",
                    expected=f"{name}: {setting.expected}",
                    remedy=f"change {name}",
                )
            )
        else:
            if type(setting.default) is float and type(value) is int:  # columns of it hold floats
                bound[name] = float(value)
            continue
        bound[name] = 1 if setting.default is REQUIRED else setting.default
    return bound | {name: tuple(value) for name, value in bound.items() if isinstance(value, list)}, problems


def schedule_of(bound: dict[str, Any]) -> CallSchedule:
    """Take ``every`` and ``after`` out of a call's complete settings, in place, and return its schedule."""
    return CallSchedule(bound.pop("every"), bound.pop("after"))


def split_schedule(
    settings: Mapping[str, Any], own: Container[str] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the settings of a call into ``every`` and ``after``, if given, and the rest.

    ``own``: settings of the called stage itself. If it has one of the same name, the value is the stage's.
    """
    schedule = {name: value for name, value in settings.items() if name in SCHEDULE and name not in own}
    return schedule, {name: value for name, value in settings.items() if name not in schedule}


def unknown_setting(
    what: str, name: str, known: Mapping[str, Any], place: Place | None, definition: Place | None = None
) -> Problem:
    """Return the Problem of a call with an unknown setting ``name``. The call's settings are ``known``."""
    close = setting_meant(name, known)
    remedy = f"write {close}=" if close else f"remove {name}=, or declare it after '*' in the function"
    return Problem(
        "unknown-setting",
        f"{what} has no setting '{name}'",
        place,
        definition,
        found=name,
        expected=f"one of {listed(known)}",
        nearest=close,
        remedy=remedy,
    )


def missing_setting(
    what: str, name: str, expected: str, place: Place | None, definition: Place | None = None
) -> Problem:
    """Return the Problem of a call without the required setting ``name``.

    ``expected`` describes its valid values.
    """
    return Problem(
        "missing-setting",
        f"{what} needs the setting '{name}'",
        place,
        definition,
        found="nothing",
        expected=f"{name}: {expected}",
        remedy=f"pass {name}= at the call",
    )


def sampling_of(sampling: Mapping[str, Mapping[str, Any]], method: str, call: str) -> dict[str, Any]:
    """Return the settings that the user of a run gave for a `generate` call, which override the flow's.

    ``sampling`` can have settings for ``method`` (all calls of a role, such as actor.generate) and for
    ``call`` (only this one, such as actor.generate#2). Those for the call win.
    """
    return {**sampling.get(method, {}), **sampling.get(call, {})}


def resampled(bound: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Override a `generate` call's settings with those of the run.

    ``bound`` has the flow's settings, ``own`` the run's. If the flow sets the temperature to 0 (greedy
    sampling), it stays 0.
    """
    greedy = bound["temperature"] == 0
    return {**bound, **{name: value for name, value in own.items() if name != "temperature" or not greedy}}


def too_short(
    settings: Mapping[str, Any],
    sampling: Mapping[str, Mapping[str, Any]],
    method: str,
    call: str,
    place: Place | None,
) -> list[Problem]:
    """Return a problem for each setting that makes a `generate` call require more tokens than its maximum.

    These settings are ``min_tokens`` and ``lengths``. ``sampling``, ``method`` and ``call`` are as in
    ``sampling_of``.
    """
    most, problems = settings["max_tokens"], []
    for setting, least in (
        ("min_tokens", settings["min_tokens"]),
        ("lengths", max(settings["lengths"], default=0)),
    ):
        if least > most:
            name = next(
                (f"--{each}.{setting}" for each in (call, method) if setting in sampling.get(each, {})),
                setting,
            )
            problems.append(
                Problem(
                    "setting-range",
                    f"{call} has {setting} above its max_tokens",
                    place,
                    found=f"{name} = {least}, max_tokens = {most}",
                    expected=f"{setting} of at most max_tokens",
                    remedy=f"lower {name}",
                )
            )
    return problems
