"""Turns the claims that a run's own proof falsified before its first iteration into findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.monitoring.diagnosis.findings import Finding


@dataclass(frozen=True)
class FalsifiedClaim:
    """A falsified claim, as recorded in a run's folder."""

    name: str  # stable, such as reward-direction
    subject: str  # the node or the role of the claim
    sentence: str
    number: str  # the measurement behind it
    place: str  # path:line; empty if the claim has no line

    def finding(self) -> Finding:
        """The claim as an alarm."""
        where = f"correct {self.place}" if self.place else "correct it"
        words = f"{self.subject}: {self.sentence} ({self.number}), according to the proof before iteration 1"
        return Finding(
            self.name,
            alarm=True,
            words=words,
            remedy=f"{where}; test it again with rlflow prove FILE",
            since=None,
        )


def falsified(recorded: Mapping[str, Any]) -> Sequence[FalsifiedClaim]:
    """The falsified claims in the content of a run's proof.json, in its order. Empty if the content has
    another form."""
    claims = recorded.get("claims")
    lines = [claim for claim in claims if isinstance(claim, dict)] if isinstance(claims, list) else []
    return [
        FalsifiedClaim(
            *(str(claim.get(name) or "") for name in ("name", "subject", "sentence", "number", "place"))
        )
        for claim in lines
        if claim.get("verdict") == "falsified"
    ]
