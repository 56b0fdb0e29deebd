"""What a section finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "failed", "untested"]


@dataclass(frozen=True)
class Check:
    """name: what was looked at. number: what was found, in ``unit``; bound: what it has to keep to, empty
    where it is only measured. why:
    of a failure its cause, of what is untested the reason, else what more there is to say."""

    name: str
    verdict: Verdict
    number: float | None = None
    unit: str = ""
    bound: str = ""
    why: str = ""

    def __str__(self) -> str:
        found = "" if self.number is None else f"{self.number:.4g} {self.unit}".strip()
        return "  ".join(
            part
            for part in (f"{self.verdict:8}", self.name, found, self.bound and f"({self.bound})", self.why)
            if part
        )


def at_most(name: str, number: float, limit: float, unit: str = "", why: str = "") -> Check:
    return Check(name, "ok" if number <= limit else "failed", number, unit, f"≤ {limit:g}", why)


def at_least(name: str, number: float, limit: float, unit: str = "", why: str = "") -> Check:
    return Check(name, "ok" if number >= limit else "failed", number, unit, f"≥ {limit:g}", why)


def holds(name: str, is_so: bool, why: str = "") -> Check:
    """why: what is there where it is not so."""
    return Check(name, "ok" if is_so else "failed", why="" if is_so else why)


def measured(name: str, number: float, unit: str = "", why: str = "") -> Check:
    """A number without a bound."""
    return Check(name, "ok", number, unit, why=why)


def untested(name: str, why: str) -> Check:
    return Check(name, "untested", why=why)
