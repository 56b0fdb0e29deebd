"""The arguments that the tracer passes to a flow's function or evaluation, and problems with that call."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from typing import Any

from rlflow.author.flow import Flow
from rlflow.errors import Place, Problem, listed, nearest


def role_names(flow: Flow, rewards: int) -> dict[str, list[str]]:
    """For each role parameter, return the names of its roles. Only ``*rewards`` can have several."""
    parameters = flow.parameters
    names = {name: [name] for name in parameters.roles}
    if parameters.rest:
        names[parameters.rest] = []
        for i in range(rewards):
            name = f"{parameters.rest}_{i}"
            while name in parameters.roles:  # another role may have this name
                name += "_"
            names[parameters.rest].append(name)
    return names


def arguments(flow: Flow, make: Any, hp: Any, rewards: int) -> tuple[list[Any], dict[str, Any]]:
    """Return the positional and keyword arguments of the flow's function, without the data.

    ``make(name)`` creates a role object, or the object for a memory. ``rewards``: how many rewards are bound
    to ``*rewards``.
    """
    bound = role_names(flow, rewards)
    rest = [make(name) for name in bound.pop(flow.parameters.rest, [])] if flow.parameters.rest else []
    names = (*bound, *flow.parameters.memories)
    settings = (
        {"hp": hp}
        if flow.parameters.hp is not None or "hp" in inspect.signature(flow.function).parameters
        else {}
    )
    if rest:  # parameters before *rewards must be passed by position
        return [*(make(name) for name in _before_rest(flow) if name in names), *rest], {
            **{name: make(name) for name in names if name not in _before_rest(flow)},
            **settings,
        }
    return [], {name: make(name) for name in names} | settings


def _before_rest(flow: Flow) -> list[str]:
    listed_parameters = inspect.signature(flow.function).parameters.values()
    return [p.name for p in listed_parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def raised(flow: Flow, error: BaseException) -> Problem:
    """Return the problem of a flow that raised while it was traced.

    Its place is the innermost line in the user's file.
    """
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if f.filename == flow.function.__code__.co_filename
    ]
    place = Place(frames[-1].filename, frames[-1].lineno or 0) if frames else flow.place
    if isinstance(error, AttributeError) and error.name and dataclasses.is_dataclass(error.obj):
        names = [field.name for field in dataclasses.fields(error.obj)]
        close = nearest(error.name, names)
        return Problem(
            "flow-raised",
            f"the settings have no '{error.name}'",
            place,
            flow.place,
            found=error.name,
            expected=f"a field of {type(error.obj).__name__}: {listed(names)}",
            nearest=close,
            remedy=f"read '{close}'" if close else f"add the field to {type(error.obj).__name__}",
        )
    return Problem(
        "flow-raised",
        f"the flow raised {type(error).__name__}: {error}",
        place,
        flow.place,
        found=f"{type(error).__name__} while the flow was traced",
        expected="a flow that can be called on symbolic batches",
        remedy="correct this line; put computations on values into a @stage",
    )
