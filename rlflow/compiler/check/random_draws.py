"""Find random draws in stages and losses that don't depend on the run's seed.

Such draws prevent exact resuming. They can also differ between ranks, or be equal on all ranks by accident.
"""

from __future__ import annotations

import ast
import inspect
import random
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlflow.author.dispatch import DP_COMPUTE
from rlflow.author.joint import JointLoss
from rlflow.author.loss import Loss
from rlflow.author.stage import Stage
from rlflow.compiler.graph.model import Node, used_nodes
from rlflow.compiler.trace.compile import Program
from rlflow.errors import Place, Problem

TORCH = (
    "rand",
    "randn",
    "randint",
    "rand_like",
    "randn_like",
    "randint_like",
    "randperm",
    "bernoulli",
    "multinomial",
    "normal",
    "poisson",
)
IN_PLACE = (
    "bernoulli_",
    "uniform_",
    "normal_",
    "exponential_",
    "random_",
    "geometric_",
    "log_normal_",
    "cauchy_",
)
METHODS = ("bernoulli", "multinomial")  # methods of tensors that return another tensor
# functions that draw from an explicit seed
SEEDED = ("Random", "default_rng", "Generator", "RandomState", "SeedSequence")


def draw_problems(program: Program) -> Iterator[Problem]:
    """Yield a warning for each draw in a stage or loss that doesn't depend on the run's seed.

    This covers functions that the stage or loss calls, if they are in the same file.
    """
    for node in used_nodes(program.graph):
        called = program.functions.get(node.name)
        for function in called.losses if isinstance(called, JointLoss) else (called,):
            if isinstance(function, Stage | Loss):
                yield from (
                    _problem(node, function, name, place) for name, place in unseeded(function.function)
                )


def _problem(node: Node, function: Stage | Loss, name: str, place: Place) -> Problem:
    if isinstance(function, Loss):
        what, expected = "loss", "a column of numbers that a stage drew"
        remedy = "draw in a stage with the parameter `generator` after '*', and read the column that it gives"
    else:
        one = (
            "`generator`, a tuple with one generator per row,"
            if function.dispatch == DP_COMPUTE
            else "`generator`"
        )
        what, expected, remedy = (
            "stage",
            "a draw from `generator`",
            f"take {one} as a parameter after '*' and pass it on",
        )
    return Problem(
        "unseeded-chance",
        f"{what} '{function.name}' draws with {name}, which the run's seed does not control: a resumed run "
        "would draw other numbers",
        node.place,
        place,
        found=f"{name} without generator=",
        expected=expected,
        remedy=remedy,
        severity="warning",
    )


def unseeded(function: Callable[..., Any], visited: set[Any] | None = None) -> Iterator[tuple[str, Place]]:
    """Yield (name of the drawing function, place) for each random draw without a generator.

    This searches the function, and those in the same file that it calls. ``visited``: code already searched.
    """
    visited = visited if visited is not None else set()
    if not isinstance(function, types.FunctionType) or function in visited:
        return
    visited.add(function)
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # functions of a console or of a part of a line have no source
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not any(keyword.arg in ("generator", None) for keyword in call.keywords):
            name = _draws(call.func, function.__globals__)
            if name is not None:
                yield name, Place(function.__code__.co_filename, first + call.lineno - 1)
        if isinstance(call.func, ast.Name):
            other = (
                inspect.unwrap(value) if callable(value := function.__globals__.get(call.func.id)) else None
            )
            if (
                isinstance(other, types.FunctionType)
                and other.__code__.co_filename == function.__code__.co_filename
            ):
                yield from unseeded(other, visited)


def _draws(called: ast.expr, names: Mapping[str, Any]) -> str | None:
    """Return the called function's name if it draws from the global random generator, or else None."""
    function = _value(called, names)
    if isinstance(called, ast.Attribute) and (
        called.attr in IN_PLACE or (called.attr in METHODS and function is None)
    ):
        return f".{called.attr}()"
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    torch = sys.modules.get("torch")
    if torch is not None and name in TORCH and getattr(torch, name, None) is function:
        return f"torch.{name}"
    if torch is not None and function is torch.nn.functional.dropout:
        return "torch.nn.functional.dropout"
    if isinstance(getattr(function, "__self__", None), random.Random) and function.__self__ is getattr(
        random, "_inst", None
    ):
        return f"random.{name}"
    own = getattr(function, "__self__", None)
    if (
        (module or type(own).__module__).startswith("numpy.random")
        and name not in SEEDED
        and own is not None
        and not isinstance(own, type)
    ):
        return f"numpy.random.{name}"
    return None


def _value(written: ast.expr, names: Mapping[str, Any]) -> Any:
    """Resolve a plain name, or an attribute of a module, to the object it stands for, or else None."""
    if isinstance(written, ast.Name):
        return names.get(written.id)
    if isinstance(written, ast.Attribute) and isinstance(
        owner := _value(written.value, names), types.ModuleType
    ):
        return getattr(owner, written.attr, None)
    return None
