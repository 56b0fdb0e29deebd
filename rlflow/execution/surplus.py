"""What a `repeat` that samples ahead keeps beyond the groups that it was asked for: it opens later iterations until it is too old."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from rlflow.author.batch import Batch
from rlflow.execution.account import Count
from rlflow.execution.engine import Engine, RepeatNames

Versions = Mapping[str, int]  # role → how many updates are behind its weights


@dataclass(frozen=True)
class SurplusGroups:
    """Whole groups that were sampled with the same weights."""

    rows: Batch
    versions: Versions  # of those weights


@dataclass
class Surplus:
    """The surplus of one `repeat`, in prompt order."""

    pieces: list[SurplusGroups] = field(default_factory=list)

    def opening(self, oldest: Versions) -> tuple[list[SurplusGroups], list[SurplusGroups]]:
        """Take out what an iteration opens with: what was sampled with weights no older than these; and what is older, which goes."""
        pieces, self.pieces = self.pieces, []
        young = [piece for piece in pieces if all(piece.versions[role] >= version for role, version in oldest.items())]
        return young, [piece for piece in pieces if piece not in young]


def groups_of(pieces: Iterable[SurplusGroups]) -> int:
    """The number of groups in all pieces."""
    return sum(piece.rows.axis.groups for piece in pieces)


def counted(engine: Engine, pieces: Iterable[SurplusGroups], names: RepeatNames) -> Iterator[tuple[str, Count]]:
    """Groups, rows and tokens of each piece, by what an account has them under."""
    for piece in pieces:
        yield from engine.counts(piece.rows, names)


def divided(pieces: Iterable[SurplusGroups], groups: int) -> tuple[list[SurplusGroups], list[SurplusGroups]]:
    """The first ``groups`` groups, or as many as there are, and the rest."""
    first: list[SurplusGroups] = []
    rest: list[SurplusGroups] = []
    for piece in pieces:
        wanted = piece.rows.axis.slots < groups - groups_of(first)
        for part, where in ((first, wanted), (rest, ~wanted)):
            if where.any():
                part.append(piece if where.all() else SurplusGroups(piece.rows.rows(where), piece.versions))
    return first, rest
