"""Draws in stages that no seed of the run decides: they break exact resume, and ranks draw alike or not by accident."""

from __future__ import annotations

import ast
import inspect
import random
import sys
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlflow.author.stage import Stage
from rlflow.dispatch import DP_COMPUTE
from rlflow.errors import Place, Problem
from rlflow.graph.model import Node
from rlflow.trace.compile import Program, used_nodes

TORCH = ("rand", "randn", "randint", "rand_like", "randn_like", "randint_like", "randperm", "bernoulli", "multinomial", "normal", "poisson")
IN_PLACE = ("bernoulli_", "uniform_", "normal_", "exponential_", "random_", "geometric_", "log_normal_", "cauchy_")
SEEDED = ("Random", "default_rng", "Generator", "RandomState", "SeedSequence")  # draw from a seed that is named


def chance_problems(program: Program) -> Iterator[Problem]:
    """Warnings of the stages' own lines, and of functions of the same file that they call."""
    for node in used_nodes(program.graph):
        stage = program.functions.get(node.name)
        if isinstance(stage, Stage):
            for name, place in unseeded(stage.function):
                yield _problem(node, stage, name, place)


def _problem(node: Node, stage: Stage, name: str, place: Place) -> Problem:
    one = "`generator`, a tuple of one for each row," if stage.dispatch == DP_COMPUTE else "`generator`"
    return Problem("unseeded-chance", f"stage '{stage.name}' draws by {name}, which the run's seed does not decide: a resumed run would "
                   "draw otherwise", node.place, place, found=f"{name} without generator=", expected="a draw from `generator`",
                   remedy=f"take {one} as a parameter after '*' and pass it on", severity="warning")


def unseeded(function: Callable[..., Any], visited: set[Any] | None = None) -> Iterator[tuple[str, Place]]:
    """Find draws of random numbers without a generator, with their places, in a function and in the functions of its own file that it
    calls."""
    visited = visited if visited is not None else set()
    if not isinstance(function, types.FunctionType) or function in visited:
        return
    visited.add(function)
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # defined in a console, or a part of a line
        return
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if not any(keyword.arg in ("generator", None) for keyword in call.keywords):
            name = _draws(call.func, function.__globals__)
            if name is not None:
                yield name, Place(function.__code__.co_filename, first + call.lineno - 1)
        if isinstance(call.func, ast.Name):
            other = inspect.unwrap(value) if callable(value := function.__globals__.get(call.func.id)) else None
            if isinstance(other, types.FunctionType) and other.__code__.co_filename == function.__code__.co_filename:
                yield from unseeded(other, visited)


def _draws(called: ast.expr, names: Mapping[str, Any]) -> str | None:
    """The name of a function that draws by the process' own chance, None for any other."""
    if isinstance(called, ast.Attribute) and called.attr in IN_PLACE:
        return f".{called.attr}()"
    function = _value(called, names)
    module, name = getattr(function, "__module__", None), getattr(function, "__name__", "")
    torch = sys.modules.get("torch")
    if torch is not None and name in TORCH and getattr(torch, name, None) is function:
        return f"torch.{name}"
    if isinstance(getattr(function, "__self__", None), random.Random) and function.__self__ is getattr(random, "_inst", None):
        return f"random.{name}"
    own = getattr(function, "__self__", None)
    if (module or type(own).__module__).startswith("numpy.random") and name not in SEEDED and own is not None and not isinstance(own, type):
        return f"numpy.random.{name}"
    return None


def _value(written: ast.expr, names: Mapping[str, Any]) -> Any:
    """The object that an expression names, directly or as an attribute of a module; None for any other expression."""
    if isinstance(written, ast.Name):
        return names.get(written.id)
    if isinstance(written, ast.Attribute) and isinstance(owner := _value(written.value, names), types.ModuleType):
        return getattr(owner, written.attr, None)
    return None
