"""Reads a reward function's parameters from the text of its file, without importing the file."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlflow.errors import Place, PlanError, listed, nearest
from rlflow.rewards.forms import TRL, Form, form_of

Def = ast.FunctionDef | ast.AsyncFunctionDef
# In CPython 3.11, all parsers share one depth counter, so two threads parsing at once may get a SystemError.
_PARSING = threading.Lock()


@dataclass(frozen=True)
class Reads:
    """The row columns and data fields that a reward function takes as parameters."""

    required: tuple[str, ...]  # names without a default
    optional: tuple[str, ...]  # names with a default
    place: Place  # where the function is defined
    rest: bool = False  # whether it has **kwargs, which receives all data fields
    # The other project's form, if the function has one; None if its parameters name columns.
    form: Form | None = None
    later: bool = False  # whether it is async, so that one process can score rows concurrently


def reads(file: str, function: str) -> Reads:
    """Return the parameters of a top-level function in a file.

    Raises PlanError if the file can't be read or doesn't define the function, or if the function can't be a
    reward.
    """
    functions = {node.name: node for node in _functions(tree(file).body)}
    if function not in functions:
        raise PlanError.of(
            "reward-function",
            f"{file} does not define a function '{function}' at its top level",
            place=Place(file, 1),
            found=listed(functions),
            expected=f"def {function}(completion, answer): …",
            nearest=nearest(function, functions),
            remedy="name a function that the file defines, or define this one",
        )
    node = functions[function]
    return _parameters(node, Place(file, node.lineno))


def source(file: str, what: str = "reward") -> str:
    """Return the text of a user's file. Raises PlanError if the file can't be read.

    ``what``: what to call the file in error messages.
    """
    path = Path(file)
    if not path.is_file():
        siblings = [item.name for item in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise PlanError.of(
            f"{what}-file",
            f"no such {what} file: {file}",
            found=f"{path.parent} contains {listed(sorted(siblings))}",
            expected=f"file.py:{'function' if what == 'reward' else 'Class'}",
            nearest=nearest(path.name, siblings),
            remedy="correct the path; a relative path starts from the folder in which the command runs",
        )
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError.of(
            f"{what}-file",
            f"cannot read {file}: {error}",
            expected="a Python file in UTF-8",
            remedy="save the file as UTF-8, and make it readable for this user",
        ) from error


def functions(file: str) -> list[str]:
    """Return the names of the top-level functions in a file.

    Raises PlanError if the file cannot be read or parsed.
    """
    return [node.name for node in _functions(tree(file).body)]


def tree(file: str, what: str = "reward") -> ast.Module:
    """Return the syntax tree of a user's file.

    ``what``: what to call the file in error messages. Raises PlanError if the file can't be read or isn't
    valid Python.
    """
    try:
        with _PARSING:
            return ast.parse(source(file, what), file)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None) or 1
        raise PlanError.of(
            f"{what}-syntax",
            f"the {what}'s file is not valid Python: {error}",
            place=Place(file, line),
            remedy="correct this line, or the one before it",
        ) from error


def _functions(body: list[ast.stmt]) -> Iterator[Def]:
    """Yield the functions defined in a module's body, including those under ``if`` and ``try``."""
    for node in body:
        if isinstance(node, Def):
            yield node
        elif isinstance(node, ast.If | ast.Try):
            yield from _functions([*node.body, *node.orelse])


def _parameters(node: Def, place: Place) -> Reads:
    arguments = node.args
    if arguments.posonlyargs or arguments.vararg:
        raise _refused(
            node, place, "it has positional-only parameters or *arguments", "parameters that name columns"
        )
    plain = [argument.arg for argument in arguments.args]
    first_default = len(plain) - len(arguments.defaults)
    defaults = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    keyword_only = {argument.arg: default is not None for argument, default in defaults}
    required = plain[:first_default] + [name for name, has_default in keyword_only.items() if not has_default]
    optional = plain[first_default:] + [name for name, has_default in keyword_only.items() if has_default]
    later = isinstance(node, ast.AsyncFunctionDef)
    if form := form_of([*required, *optional]):
        if lacking := next((name for name in required if name in form.lacking), None):
            why = f"it needs {form.project}'s '{lacking}'"
            raise _refused(node, place, why, "parameters that rlflow passes", form.lacking[lacking])
        others = tuple(name for name in required if name not in form.parameters)
        ids = ("tokens",) if form is TRL and "completion_ids" in (*required, *optional) else ()
        own = tuple(
            name for name in optional if form.columns and name not in (*form.parameters, *form.lacking)
        )
        rest = form.columns and arguments.kwarg is not None
        return Reads(
            (*form.reads, *ids, *others), (*form.fields, *own), place, rest, form, later and not form.batch
        )
    if arguments.kwarg and "completion" not in (*required, *optional):
        required.append("completion")  # passed through **kwargs
    return Reads(
        tuple(required),
        tuple(optional),
        place,
        arguments.kwarg is not None,
        None,
        later,
    )


def _refused(node: Def, place: Place, why: str, expected: str, remedy: str = "") -> PlanError:
    return PlanError.of(
        "reward-function",
        f"'{node.name}' cannot be a reward: {why}",
        place=place,
        expected=expected,
        remedy=remedy or f"def {node.name}(completion, answer): …",
    )
