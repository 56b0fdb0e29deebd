"""Turn falsified claims into findings.

The claims were recorded by the proof that a run makes before its first iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlflow.monitoring.diagnosis.findings import Finding


@dataclass(frozen=True)
class FalsifiedClaim:
    """A claim that the run's own proof falsified, as recorded in its folder."""

    name: str  # stable name of the claim, such as reward-direction
    subject: str  # the node or the role that the claim is about
    sentence: str
    number: str  # the measured number
    place: str  # path:line; empty if the claim does not refer to a line

    def finding(self) -> Finding:
        """Return the claim as a finding. It is an alarm."""
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
    """Return the falsified claims in a run's proof.json, in order. Empty if the file looks different."""
    claims = recorded.get("claims")
    lines = [claim for claim in claims if isinstance(claim, dict)] if isinstance(claims, list) else []
    return [
        FalsifiedClaim(
            *(str(claim.get(name) or "") for name in ("name", "subject", "sentence", "number", "place"))
        )
        for claim in lines
        if claim.get("verdict") == "falsified"
    ]
