"""YAML documents in a readable form: multi-line texts as blocks, keys in their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml


class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the package has no types
    """Writes multi-line texts as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def joined(comments: Iterable[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Return the documents as one text, below the comments."""
    texts = (
        yaml.dump(document, Dumper=Dumper, sort_keys=False, width=140, allow_unicode=True)
        for document in documents
    )
    return "".join(f"# {comment}\n" for comment in comments) + "---\n".join(texts)
