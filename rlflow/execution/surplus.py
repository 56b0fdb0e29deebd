"""What a `repeat` that samples ahead keeps beyond the groups that it was asked for: it opens later iterations until it is too old."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from rlflow.batch import Batch

Versions = Mapping[str, int]  # role → how many updates are behind its weights


@dataclass(frozen=True)
class SurplusGroups:
    """Whole groups that were sampled with the same weights."""

    rows: Batch
    made: Versions


@dataclass
class Surplus:
    """The surplus of one `repeat`, in prompt order. ``dropped``: groups that were too old, as long as no metrics have told of them."""

    pieces: list[SurplusGroups] = field(default_factory=list)
    dropped: int = 0

    def opening(self, oldest: Versions) -> list[SurplusGroups]:
        """Take out what an iteration opens with: what was sampled with weights no older than these; what is older goes."""
        pieces, self.pieces = self.pieces, []
        young = [piece for piece in pieces if all(piece.made[role] >= version for role, version in oldest.items())]
        self.dropped += groups_of(pieces) - groups_of(young)
        return young

    def told(self) -> int:
        """How many groups were dropped since this was asked last."""
        dropped, self.dropped = self.dropped, 0
        return dropped


def groups_of(pieces: Iterable[SurplusGroups]) -> int:
    return sum(piece.rows.axis.groups for piece in pieces)


def divided(pieces: Iterable[SurplusGroups], groups: int) -> tuple[list[SurplusGroups], list[SurplusGroups]]:
    """The first ``groups`` groups, or as many as there are, and the rest."""
    first: list[SurplusGroups] = []
    rest: list[SurplusGroups] = []
    for piece in pieces:
        wanted = piece.rows.axis.slots < groups - groups_of(first)
        for part, where in ((first, wanted), (rest, ~wanted)):
            if where.any():
                part.append(piece if where.all() else SurplusGroups(piece.rows.rows(where), piece.made))
    return first, rest
