"""Find a flow's roles and settings by parsing its file, without importing it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

DECORATOR, SETTINGS = "flow", "hp"
KEYWORDS = {"data", "state", "evaluate", "keeps"}  # of the decorator; only the last adds parameters
STORES = {"table", "buffer"}  # what `keeps` adds as parameters that aren't roles


@dataclass(frozen=True)
class Outline:
    """The parts of a flow that command-line flags can refer to."""

    roles: tuple[str, ...]  # without those of ``rest``
    rest: str | None  # the name of ``*rewards``
    own: tuple[str, ...]  # names of its settings
    sampling: tuple[str, ...]  # roles whose ``generate`` it calls


def outline(file: Path, flow: str | None = None) -> Outline | None:
    """Return the outline of the flow called ``flow``, or of the only flow in the file.

    Returns None if this would require loading the file: for example, because the settings' class is imported,
    or because the file isn't valid Python.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and _is_flow(node) and flow in (None, node.name)
    ]
    return _outline(found[0], tree) if len(found) == 1 else None


def _is_flow(function: ast.FunctionDef) -> bool:
    return any(
        isinstance(name, ast.Name) and name.id == DECORATOR for name in map(_called, function.decorator_list)
    )


def _called(decorator: ast.expr) -> ast.expr:
    return decorator.func if isinstance(decorator, ast.Call) else decorator


def _outline(function: ast.FunctionDef, tree: ast.Module) -> Outline | None:
    keywords = [
        each for call in function.decorator_list if isinstance(call, ast.Call) for each in call.keywords
    ]
    own, memories = _settings(function, tree), _memories(keywords)
    unknown = any(each.arg not in KEYWORDS for each in keywords)
    if own is None or memories is None or len(function.decorator_list) > 1 or unknown:
        return None
    listed = [*function.args.posonlyargs, *function.args.args]
    others = {SETTINGS, *memories}
    roles = tuple(each.arg for each in [*listed[1:], *function.args.kwonlyargs] if each.arg not in others)
    return Outline(
        roles, function.args.vararg.arg if function.args.vararg else None, own, _sampling(function, roles)
    )


def _memories(keywords: list[ast.keyword]) -> set[str] | None:
    """Return the parameters that hold what the flow keeps, or None if they can't be found in the text.

    Roles that follow another, which `keeps` declares too, aren't among them.
    """
    given = [each.value for each in keywords if each.arg == "keeps"]
    if not given:
        return set()
    kept = given[0].body if isinstance(given[0], ast.Lambda) else None
    if not isinstance(kept, ast.Dict):
        return None
    memories = set()
    for key, value in zip(kept.keys, kept.values, strict=True):
        made = value.func if isinstance(value, ast.Call) else None
        if not isinstance(key, ast.Constant) or not isinstance(made, ast.Name):
            return None
        if made.id in STORES:
            memories.add(str(key.value))
        elif made.id != "follow":
            return None
    return memories


def _settings(function: ast.FunctionDef, tree: ast.Module) -> tuple[str, ...] | None:
    """Return the names of the settings, or None if they can't be found in the text."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + [*arguments.defaults]
    pairs = [*zip(positional, defaults, strict=True)]
    pairs += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    given = [default for argument, default in pairs if argument.arg == SETTINGS]
    if not given or given[0] is None:
        return ()
    name = given[0].func if isinstance(given[0], ast.Call) else None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and isinstance(name, ast.Name) and node.name == name.id:
            return None if node.bases else _fields(node)
    return None


def _fields(kind: ast.ClassDef) -> tuple[str, ...]:
    return tuple(
        item.target.id
        for item in kind.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


def _sampling(function: ast.FunctionDef, roles: tuple[str, ...]) -> tuple[str, ...]:
    called = {
        node.func.value.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "generate"
        and isinstance(node.func.value, ast.Name)
    }
    return tuple(role for role in roles if role in called)
