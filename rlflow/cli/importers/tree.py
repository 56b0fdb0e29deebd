"""Read a YAML file of settings as nested mappings, up to a maximum size.

Without a limit, a few lines with aliases could expand to more data than fits into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from rlflow.errors import PlanError

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
MOST = 20_000  # most values, counted again for each alias
LONGEST = 1 << 20  # maximum number of characters in all values together
DEEPEST = 32  # most levels
DIGITS = 64  # most digits of a number
NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read(text: str, name: str) -> Mapping[str, Any]:
    """Return the mapping in a YAML text. ``name``: the file's name in messages.

    Raises PlanError if the text is damaged, isn't a mapping, gives a key twice, or gets too large when
    aliases are expanded.
    """
    try:
        _check_nesting(text)
        loader = LOADER(text)
        try:
            node = loader.get_single_node()
            _check_nodes(node)
            tree = {} if node is None else loader.construct_document(node)
        finally:
            loader.dispose()
    except (yaml.YAMLError, ValueError) as error:
        raise PlanError.of(
            "import",
            f"'{name}' is not a YAML file of settings",
            found=" ".join(str(error).split()),
            expected="mappings with plain values",
            remedy="correct the file at that place",
        ) from error
    if not isinstance(tree, Mapping):
        raise PlanError.of(
            "import",
            f"'{name}' is not a YAML file of settings",
            found=f"a {type(tree).__name__}",
            expected="a mapping",
            remedy="name the file that holds the trainer's configuration",
        )
    return tree


def _check_nesting(text: str) -> None:
    """Limit the depth and number of values in the text, because later steps read it recursively."""
    depth = 0
    for number, event in enumerate(yaml.parse(text, LOADER)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST or number > 4 * MOST:
            raise ValueError(f"line {event.start_mark.line + 1}: more than {DEEPEST} levels or {MOST} values")


def _check_nodes(root: Any) -> None:
    """Limit the size with all aliases expanded, and make sure that no mapping has a key twice."""
    letters = 0
    for values, (node, depth) in enumerate(_nodes(root, 0)):
        letters += len(node.value) if isinstance(node, yaml.ScalarNode) else 0
        if values > MOST or letters > LONGEST or depth > DEEPEST:
            raise ValueError(
                f"line {node.start_mark.line + 1}: with aliases expanded, the file has more than {MOST} values, "
                f"{LONGEST} characters or {DEEPEST} levels"
            )
        if node.tag in NUMBERS and len(node.value) > DIGITS:
            raise ValueError(
                f"line {node.start_mark.line + 1}: a number of {len(node.value)} digits, expected at "
                f"most {DIGITS}"
            )
        if isinstance(node, yaml.MappingNode):
            _check_keys(node)


def _check_keys(node: Any) -> None:
    seen: set[str] = set()
    for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
        if key.value in seen:
            raise ValueError(f"line {key.start_mark.line + 1}: the key '{key.value:.60}' is given twice")
        seen.add(key.value)


def _nodes(node: Any, depth: int) -> Iterator[tuple[Any, int]]:
    if node is None:
        return
    yield node, depth
    if isinstance(node, yaml.MappingNode):
        children = [child for pair in node.value for child in pair]
    else:
        children = node.value if isinstance(node, yaml.SequenceNode) else []
    for child in children:
        yield from _nodes(child, depth + 1)
