"""Readable YAML documents: multi-line strings are written as blocks, and keys keep their order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml


class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # the package has no types
    """YAML dumper that writes multi-line strings as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, _text)


def joined(comments: Iterable[str], documents: Sequence[Mapping[str, Any]]) -> str:
    """Join several YAML documents into one text that starts with the comments."""
    texts = (
        yaml.dump(document, Dumper=Dumper, sort_keys=False, width=140, allow_unicode=True)
        for document in documents
    )
    return "".join(f"# {comment}\n" for comment in comments) + "---\n".join(texts)
