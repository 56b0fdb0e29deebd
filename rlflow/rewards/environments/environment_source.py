"""Reads an environment's class from the text of its file, without importing the file."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rlflow.author.annotations import annotated
from rlflow.errors import Place, PlanError, listed, nearest
from rlflow.rewards import text
from rlflow.rewards.environments.tool_schema import Tool, tool_of

REQUIRED = object()  # marks a setting without a default
UNKNOWN = object()  # marks a default that is not a literal
OWN = ("reset", "step", "score", "close")  # methods that are not tools
SEED = "seed"  # the parameter of ``reset`` that is not a column

Def = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class EnvironmentSetting:
    """A setting of an environment: a parameter of the class's ``__init__``."""

    type: Any  # type as annotated; Any without an annotation
    default: Any  # the default value, REQUIRED or UNKNOWN


@dataclass(frozen=True)
class ClassSource:
    """What the text of a file says about an environment's class."""

    place: Place  # where the class is defined
    text: str  # text of the whole file
    settings: Mapping[str, EnvironmentSetting] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # columns that ``reset`` requires
    optional: tuple[str, ...] = ()  # columns that ``reset`` uses if rows have them
    rest: bool = False  # whether ``reset`` accepts all fields in the data
    tools: tuple[Tool, ...] = ()  # methods that a model may call, in a class without ``step``
    # Whether an episode that is replayed with the same replies gives the same answers.
    repeatable: bool = True
    # Whether the class gives rewards: it has ``score``, or a turn with a reward.
    scores: bool = False
    # whether a method is async, so that one process can run calls of several episodes concurrently
    later: bool = False
    # whether the class has ``reset``; without it, an episode begins with the model's first turn
    opens: bool = True
    ends: bool = (
        # whether the class has ``score`` or ``close``; without them, nothing is called at an episode's end
        True
    )


def read_class(file: str, name: str) -> ClassSource:
    """Describe a class in a file.

    Raises PlanError if the file can't be read or doesn't define the class, or if the class isn't a valid
    environment.
    """
    tree = text.tree(file, "environment")
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        shown = str(Place(file, 1)).removesuffix(":1")
        raise PlanError.of(
            "env-class",
            f"{shown} does not define a class '{name}' at its top level",
            place=Place(file, 1),
            found=listed(classes),
            expected="a class with reset and step, or with tools",
            nearest=nearest(name, classes),
            remedy=f"--env {shown}:{nearest(name, classes) or next(iter(classes), 'CLASS')}",
        )
    node, known = classes[name], _lineage(classes[name], classes)
    methods = {
        method.name: method for each in reversed(known) for method in each.body if isinstance(method, Def)
    }
    whole = len(known) == 1 + sum(len(each.bases) for each in known)  # whether all bases are in this file
    place = Place(file, node.lineno)
    public = [
        method
        for key, method in methods.items()
        if not key.startswith("_") and key not in OWN and not method.decorator_list
    ]
    tools = tuple(tool_of(method, file) for method in public) if "step" not in methods else ()
    if whole and "step" not in methods and not tools:
        raise PlanError.of(
            "env-class",
            f"the class '{name}' is not an environment: define step() or public methods as tools",
            place=place,
            found=listed(methods),
            expected="step(self, said) -> Turn, or public methods that a model may call",
            remedy="def step(self, said): return Turn(says=…)",
        )
    required, optional, rest = _columns(methods.get("reset"), file)
    return ClassSource(
        place,
        text.source(file, "environment"),
        _settings(methods.get("__init__"), file),
        required,
        optional,
        rest,
        tools,
        _flag(known, "repeatable", True),
        "score" in methods or _rewards(methods.values()),
        any(isinstance(method, ast.AsyncFunctionDef) for method in methods.values()),
        not whole or "reset" in methods,
        not whole or "score" in methods or "close" in methods,
    )


def class_names(file: str) -> list[str]:
    """Return the names of the top-level classes in a file.

    Raises PlanError if the file cannot be read or parsed.
    """
    return [node.name for node in text.tree(file, "environment").body if isinstance(node, ast.ClassDef)]


def _lineage(node: ast.ClassDef, classes: Mapping[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """Return the class and its bases from the same file, nearest first."""
    line = [node]
    for each in line:
        bases = [classes[base.id] for base in each.bases if isinstance(base, ast.Name) and base.id in classes]
        line += [base for base in bases if base not in line]
    return line


def _parameters(method: Def, file: str) -> Iterator[tuple[ast.arg, ast.expr | None]]:
    """Yield the parameters after ``self``, each with its default.

    Raises PlanError for ``*arguments`` and positional-only parameters.
    """
    arguments = method.args
    if arguments.posonlyargs or arguments.vararg:
        raise PlanError.of(
            "env-parameters",
            f"'{method.name}' has positional-only parameters or *arguments",
            place=Place(file, method.lineno),
            expected="parameters that are passed by name",
            remedy=f"def {method.name}(self, *, …)",
        )
    plain = arguments.args[1:]
    yield from zip(
        plain, [*[None] * (len(plain) - len(arguments.defaults)), *arguments.defaults], strict=True
    )
    yield from zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)


def _settings(method: Def | None, file: str) -> dict[str, EnvironmentSetting]:
    if method is None:
        return {}
    return {
        parameter.arg: EnvironmentSetting(
            annotated(parameter.annotation) if parameter.annotation else Any, _value(default)
        )
        for parameter, default in _parameters(method, file)
    }


def _value(default: ast.expr | None) -> Any:
    if default is None:
        return REQUIRED
    try:
        return ast.literal_eval(default)
    except ValueError:
        return UNKNOWN


def _columns(method: Def | None, file: str) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    if method is None:
        return (), (), False
    names = {
        parameter.arg: default for parameter, default in _parameters(method, file) if parameter.arg != SEED
    }
    required = tuple(name for name, default in names.items() if default is None)
    return required, tuple(name for name in names if name not in required), method.args.kwarg is not None


def _flag(known: list[ast.ClassDef], name: str, default: bool) -> bool:
    """Return the value of the boolean class attribute ``name``, or ``default`` if no class sets it."""
    for each in known:
        for statement in each.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=target)], value=ast.Constant(value=value)) if (
                    target == name
                ):
                    return bool(value)
                case ast.AnnAssign(target=ast.Name(id=target), value=ast.Constant(value=value)) if (
                    target == name
                ):
                    return bool(value)
    return default


def _rewards(methods: Any) -> bool:
    """True if any method creates a ``Turn`` with a reward, or with ``**keywords``, which may include one."""
    calls = (node for method in methods for node in ast.walk(method) if isinstance(node, ast.Call))
    named = (
        node for node in calls if (getattr(node.func, "id", "") or getattr(node.func, "attr", "")) == "Turn"
    )
    return any(
        len(node.args) > 1 or any(word.arg in ("reward", None) for word in node.keywords) for node in named
    )
