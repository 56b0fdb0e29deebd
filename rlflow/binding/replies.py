"""What the model folders of a flow say of replies, judged by their files before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rlflow.binding.environments import sampling_roles
from rlflow.data.ends import ends_of
from rlflow.errors import Problem
from rlflow.graph.model import Graph


def reply_problems(graph: Graph, default: str | Path | None, own: Mapping[str, str | Path | None]) -> Iterator[Problem]:
    """Warnings of folders whose files contradict each other about what ends a reply. ``default``: the folder whose tokenizer encodes the
    data; ``own``: those of roles that have another."""
    folders = [default, *(own.get(role) for role in sampling_roles(graph))]
    for folder in dict.fromkeys(Path(each).absolute() for each in folders if each is not None):
        yield from ends_of(folder).problems
