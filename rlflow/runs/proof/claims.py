"""Claims about a run, each with a verdict, a measurement and a line of code."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from rlflow.errors import Place, printable

Verdict = Literal["proved", "falsified", "unproved"]


@dataclass(frozen=True)
class Claim:
    """A statement that is true of every correct run, and the verdict on it for the current run."""

    name: str  # a stable name, such as reward-direction
    subject: str  # the node or role that the claim is about
    verdict: Verdict
    sentence: str
    number: str = ""  # the measurement behind the verdict, as text
    place: Place | None = None
    ends_run: bool = False  # whether the run stops if this is falsified, unless --prove is warn or off

    def __str__(self) -> str:
        where = f"{self.place}: " if self.place and self.verdict == "falsified" else ""
        measured = f" ({self.number})" if self.number else ""
        return printable(f"{self.verdict:<9}  {where}{self.subject}: {self.sentence}{measured}")


def judged(
    name: str, subject: str, holds: bool, sentences: tuple[str, str], number: str, place: Place | None = None
) -> Claim:
    """Return a claim that is "proved" if ``holds`` is true and "falsified" otherwise.

    ``name``: the claim's stable name. ``subject``: the node or role it is about. ``sentences``: what to say
    if it is proved, and if it is falsified. ``number``: the measurement, as text.
    """
    return Claim(
        name,
        subject,
        "proved" if holds else "falsified",
        sentences[0] if holds else sentences[1],
        number,
        place,
    )


def encoded(claims: list[Claim]) -> bytes:
    """Encode the claims as JSON.

    The format is ``{"claims": [{"name": …, "subject": …, "verdict": …, "sentence": …, "number": …, "place":
    "path:line"}]}``.
    """
    plain = [{**vars(claim), "place": str(claim.place) if claim.place else None} for claim in claims]
    return (json.dumps({"claims": plain}, indent=1) + "\n").encode()


def summary(claims: list[Claim]) -> str:
    """Count the claims by verdict, as text: "7 proved, 0 falsified, 1 unproved"."""
    counts = {
        verdict: sum(claim.verdict == verdict for claim in claims)
        for verdict in ("proved", "falsified", "unproved")
    }
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
