"""What a run's own proof falsified before its first iteration, as findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.monitoring.diagnosis.findings import Finding


@dataclass(frozen=True)
class FalsifiedClaim:
    """A falsified claim, as the folder of a run recorded it."""

    name: str  # stable, such as reward-direction
    subject: str  # the node or the role that it is about
    sentence: str
    number: str  # the measurement behind it
    place: str  # path:line; empty where it is about no line

    def finding(self) -> Finding:
        """The claim as an alarm."""
        where = f"correct {self.place}" if self.place else "correct it"
        words = f"{self.subject}: {self.sentence} ({self.number}), as the proof before iteration 1 shows"
        return Finding(
            self.name,
            alarm=True,
            words=words,
            remedy=f"{where}; rlflow prove FILE tries it again",
            since=None,
        )


def falsified(recorded: Mapping[str, Any]) -> Sequence[FalsifiedClaim]:
    """The falsified claims in the content of a run's proof.json, in its order; none of what is not such a
    content."""
    claims = recorded.get("claims")
    lines = [claim for claim in claims if isinstance(claim, dict)] if isinstance(claims, list) else []
    return [
        FalsifiedClaim(
            *(str(claim.get(name) or "") for name in ("name", "subject", "sentence", "number", "place"))
        )
        for claim in lines
        if claim.get("verdict") == "falsified"
    ]
