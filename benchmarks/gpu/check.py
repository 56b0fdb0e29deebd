"""The result of one check, and functions that create it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["ok", "failed", "untested"]


@dataclass(frozen=True)
class Check:
    """The result of one check.

    ``number``: the measured value, in ``unit``. ``bound``: the required bound; empty if there is none.
    ``why``: why the check failed or was not made, or a remark.
    """

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
    """Return a check that requires ``number`` to be at most ``limit``."""
    return Check(name, "ok" if number <= limit else "failed", number, unit, f"≤ {limit:g}", why)


def at_least(name: str, number: float, limit: float, unit: str = "", why: str = "") -> Check:
    """Return a check that requires ``number`` to be at least ``limit``."""
    return Check(name, "ok" if number >= limit else "failed", number, unit, f"≥ {limit:g}", why)


def holds(name: str, is_so: bool, why: str = "") -> Check:
    """Return a check that requires a condition to be true. ``why``: the cause, shown only if it is false."""
    return Check(name, "ok" if is_so else "failed", why="" if is_so else why)


def measured(name: str, number: float, unit: str = "", why: str = "") -> Check:
    """Return a check that reports a number without a bound. It cannot fail."""
    return Check(name, "ok", number, unit, why=why)


def untested(name: str, why: str) -> Check:
    """Return a check that was not made. ``why``: the reason."""
    return Check(name, "untested", why=why)
