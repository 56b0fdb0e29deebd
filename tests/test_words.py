"""Words of the source: every public callable is explained, sentences stand alone, fields are explained beside them, and values have
names that say what they are."""

import ast
import re
from collections.abc import Iterator

from sources import Source, sources

# A docstring is read in an editor, without the one before it: it cannot begin with what it leaves out.
RELATIVE = ("The same", "Those", "That of", "Of ", "As ", "Its ", "Their ", "Such ", "Which ", "And ", "With ", "By ", "For ", "From ",
            "In words", "What ", "Also ")  # fmt: skip
# Participles that say what happened to a value and not what it is.
BARE = {"found", "made", "held", "told", "given", "did", "kept", "gone", "lies", "mine", "theirs", "said", "taken", "seen", "heard"}
# What several classes are called since one is there in place of another: protocols and what fulfils them, settings that a backend is asked
# for by name.
ALIKE = {"Trainer", "Generator", "TrainerSettings", "GeneratorSettings", "Settings", "Commit", "Workers"}
# Fields whose names stand in what users read: the lines of a problem, and identity.json.
SHOWN = {("rlflow/errors.py", "found"), ("rlflow/runs/identity.py", "kept"), ("rlflow/runs/identity.py", "told")}


def files() -> list[Source]:
    return sources("rlflow", "backends")


def definitions(node: ast.AST, name: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """(qualified name, definition) of each class and function, but for functions within functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            yield f"{name}{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from definitions(child, f"{name}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from definitions(child, name)


def described() -> Iterator[tuple[str, str, str | None]]:
    """(file, qualified name, docstring) of each definition; the signatures of an overloaded function are none."""
    for file in files():
        for name, definition in definitions(file.tree):
            if not any(ast.unparse(decorator).endswith("overload") for decorator in definition.decorator_list):
                yield str(file.path), name, ast.get_docstring(definition)


def test_every_public_callable_has_a_docstring():
    public = [(file, name, text) for file, name, text in described() if not any(part.startswith("_") for part in name.split("."))]
    assert len(public) > 2000
    assert [(file, name) for file, name, text in public if not text] == []


def test_a_docstring_can_be_read_without_its_neighbours():
    assert [(file, name, text) for file, name, text in described() if text and text.startswith(RELATIVE)] == []


def fields(definition: ast.ClassDef) -> list[str]:
    return [part.target.id for part in definition.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)]


def test_fields_are_explained_beside_them_and_not_in_the_docstring_of_their_class():
    classes = [(str(file.path), node) for file in files() for node in file.nodes if isinstance(node, ast.ClassDef)]
    assert sum(len(fields(node)) for _, node in classes) > 1000
    listed = [(file, node.name, name) for file, node in classes for name in fields(node)
              if re.search(rf"(?<!\w)`*{name}`*(, `*\w+`*)*( and `*\w+`*)?:\s", ast.get_docstring(node) or "")]  # fmt: skip
    assert listed == []


def bound(node: ast.AST) -> Iterator[str]:
    """The name to which a node gives a value: of a variable, a field, an attribute or a parameter."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    if isinstance(node, ast.arg):
        yield node.arg


def test_no_value_is_called_by_what_happened_to_it():
    names = [(str(file.path), name) for file in files() for node in file.nodes for name in bound(node)]
    assert len(names) > 20_000
    assert {(file, name) for file, name in names if name in BARE} == SHOWN


def test_a_name_stands_for_one_class():
    """Comparisons have words of their own for what they measure."""
    places: dict[str, list[str]] = {}
    for file in files():
        for node in file.tree.body if not str(file.path).startswith("rlflow/bench/") else ():
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(file.path))
    assert {name: files for name, files in places.items() if len(files) > 1 and name not in ALIKE} == {}
    assert [name for name in sorted(ALIKE) if len(places.get(name, [])) < 2 and name != "Settings"] == []
