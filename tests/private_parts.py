"""Private parts of libraries that rlflow uses: that they exist, that they take what rlflow passes, and that
only one file of rlflow names them."""

import ast
import importlib
import inspect
from collections.abc import Iterable, Mapping
from importlib.metadata import packages_distributions, version
from typing import Any

from sources import Source, sources

# part → the parameters that rlflow passes; None if it is not called, or if its signature cannot be read
Parts = Mapping[str, tuple[str, ...] | None]


def found(name: str) -> Any:
    """Return what a dotted name names, after importing as much of it as are modules. Raises LookupError."""
    words = name.split(".")
    for count in range(len(words), 0, -1):
        try:
            value = importlib.import_module(".".join(words[:count]))
        except ImportError:
            continue
        for word in words[count:]:
            if not hasattr(value, word):
                raise LookupError(name)
            value = getattr(value, word)
        return value
    raise LookupError(name)


def changes(parts: Parts) -> list[str]:
    """Return a line for each part that is gone, or that does not take its parameters."""
    lines = []
    for name, parameters in parts.items():
        try:
            part = found(name)
        except LookupError:
            lines.append(f"{name} is gone")
            continue
        taken = inspect.signature(part).parameters if parameters is not None else {}
        if any(each.kind is each.VAR_KEYWORD for each in taken.values()):
            continue
        if lacking := [each for each in parameters or () if each not in taken]:
            lines.append(f"{name} takes {', '.join(taken) or 'nothing'}, and not {', '.join(lacking)}")
    return lines


def check_parts(library: str, file: str, parts: Parts) -> None:
    """Fail with what to do if a part of ``library`` that ``file`` uses is gone or takes other parameters."""
    if lines := changes(parts):
        distribution = packages_distributions().get(library, [library])[0]
        try:
            release = version(distribution)
        except ModuleNotFoundError:
            release = "of this environment"
        raise AssertionError(
            f"{library} {release} has changed private parts that {file} uses:\n  "
            + "\n  ".join(lines)
            + f"\nFind out what replaces them in {library}, adapt {file} and the list in its test, and keep the "
            f"old part as long as pyproject.toml allows releases that have it. Or set the upper bound of "
            f"{library} in pyproject.toml to the last release that has the parts."
        )


def elsewhere(library: str, allowed: Iterable[str], parts: Parts, *internals: str) -> list[str]:
    """Return the places, as FILE:LINE, where rlflow names a private part of a library in other files.

    A part is private if a word of its dotted name begins with an underscore, or if the name begins with one
    of ``internals``. An attribute of any object is private if it has the name of one of the private ``parts``.
    """
    attributes = {word for part in parts if (word := part.rpartition(".")[2]).startswith("_")}
    files = [each for each in sources("rlflow", "backends") if each.path.as_posix() not in set(allowed)]
    return [
        f"{each.path}:{line}: {name}"
        for each in files
        for line, name in names(each)
        if (name.partition(".")[0] == library and (_private(name) or name.startswith(internals)))
        or (name.startswith(".") and name[1:] in attributes)
    ]


def names(each: Source) -> Iterable[tuple[int, str]]:
    """Yield (line, dotted name) of each import, each attribute of a module, and each text that may name a
    module; and (line, ".NAME") of each attribute."""
    for node in each.nodes:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield node.lineno, f".{node.attr}"
            words, inner = [node.attr], node.value
            while isinstance(inner, ast.Attribute):
                words.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield node.lineno, ".".join([inner.id, *reversed(words)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "." in node.value:
            yield node.lineno, node.value


def _private(name: str) -> bool:
    return any(word.startswith("_") and not word.startswith("__") for word in name.split("."))
