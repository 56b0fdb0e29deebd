"""Flags that are nothing in a run, and the flag that was probably meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from rlflow.author.words import SETTINGS
from rlflow.config.options import Options
from rlflow.config.sampling import TYPES
from rlflow.errors import Problem, listed, misspelt, nearest

SWITCHES = ("json", "quiet")
OF_THE_RUN = (*(each.name for each in fields(Options)), *SWITCHES, "config")


def no_sampling() -> Sequence[str]:
    """The roles that sample, where nothing is known of a flow."""
    return ()


@dataclass(frozen=True)
class Known:
    """What a flow has that a flag may name."""

    own: tuple[str, ...] = ()  # its settings, without hp.
    roles: tuple[str, ...] = ()
    # gives the roles that sample
    sampling: Callable[[], Sequence[str]] = field(default=no_sampling, compare=False)


def unknown_flag(name: str, settings: Iterable[str], known: Known) -> Problem:
    """A flag without a role that is neither the run's nor a setting of any backend of its roles
    (``settings``)."""
    return Problem(
        "unknown-flag",
        f"there is no flag {dashed(name)}",
        found=dashed(name),
        expected="a flag of the run, or of a backend",
        **_remedy(meant(name, settings, known)),
    )


def unknown_setting(role: str, name: str, settings: Iterable[str], known: Known) -> Problem:
    """A flag of a role, --ROLE.NAME, that none of its two backends has as a setting (``settings``)."""
    settings = sorted(settings)
    half, dot, rest = name.rpartition(".")
    fitting = [each.removeprefix(half + dot) for each in settings if each.startswith(half + dot)]
    return Problem(
        "unknown-setting",
        f"role '{role}' has no setting '{name}'",
        found=f"--{role}.{name}",
        expected=f"one of {listed(settings)}",
        **_remedy(meant(rest, fitting, known, f"{role}.{half}" if half else role)),
    )


def unknown_own(name: str, known: Known) -> Problem:
    """A flag --hp.NAME that is no setting of the flow."""
    return Problem(
        "unknown-setting",
        f"there is no setting 'hp.{name}'",
        found=name,
        expected=f"one of {listed(known.own)}",
        **_remedy(meant(name, (), known)),
    )


def belongs_nowhere(name: str, heads: Sequence[str], known: Known) -> Problem:
    """A flag with a dot and nothing of the flow before it; ``heads`` are what may be there. A key of another
    project ends in its word."""
    head, _, rest = name.partition(".")
    near = nearest(head, heads)
    flag = f"--{near}.{rest}" if near else meant(rest.rpartition(".")[2], (), known)
    return Problem(
        "unknown-flag",
        f"--{name} belongs to nothing in this flow",
        found=head,
        expected=f"one of {listed(heads)} before the dot",
        **_remedy(flag),
    )


def _remedy(flag: str | None) -> dict[str, Any]:
    """What a problem says of the flag that is probably meant."""
    first = f"write {flag}, if that is meant; " if flag else ""
    return {"nearest": flag, "remedy": f"{first}--help lists all flags of this flow"}


def meant(name: str, settings: Iterable[str], known: Known, role: str = "") -> str | None:
    """The flag that was probably meant, or several that belong together; None without one. It is the one that
    is spelled most alike, and of several the first among settings of the flow, of `generate`, of the run, of
    roles, and words of other projects. Where that is a word for which this flow has nothing, no flag is
    meant. ``settings``: those of backends; ``role``: the one that the flag was written for, or its half."""
    seek = _Search(set(settings), known, role)
    near = [
        (apart, each)
        for each in seek.names()
        if (apart := misspelt(name, each.rpartition(".")[2])) is not None
    ]
    closest = min(near, key=lambda pair: pair[0])[1] if near else ""
    return seek.flag(closest) or seek.word(closest)


@dataclass(frozen=True)
class _Search:
    settings: set[str]
    known: Known
    role: str

    def names(self) -> Iterator[str]:
        """All names that may have been misspelt, in the order in which they come where several are as
        near."""
        yield from (f"hp.{name}" for name in self.known.own)
        yield from (f"generate.{name}" for name in TYPES)
        yield from (*OF_THE_RUN, *sorted(name for name in self.settings if "." not in name), *SETTINGS)

    def word(self, name: str) -> str | None:
        """The flag that another project's word stands for in this flow."""
        for flags in SETTINGS.get(name, ()):
            each = [self.flag(flag) for flag in flags.split(" + ")]
            if all(each):
                return " and ".join(filter(None, each))
        return None

    def flag(self, name: str) -> str | None:
        """How a name of ``names`` or of the words is written as a flag; None where the flow has no such
        thing."""
        head, _, rest = name.rpartition(".")
        if head == "hp":
            return f"--{name}" if rest in self.known.own else None
        if head == "generate":
            return self._sampling(rest) if rest in TYPES else None
        if head in ("data", "env") or head in self.known.roles:
            return f"--{name}"
        if not head and name in self.settings:
            return f"--{self.role}.{name}" if self.role else dashed(name)
        return dashed(name) if name in OF_THE_RUN else None

    def _sampling(self, name: str) -> str | None:
        roles = self.known.sampling()
        written = [role for role in roles if self.role.partition(".")[0] in ("", role)]
        return " and ".join(f"--{role}.generate.{name}" for role in written) or None


def dashed(name: str) -> str:
    """A name as a flag: ``save_every`` as --save-every; one with a dot keeps its underscores."""
    return f"--{name}" if "." in name else "--" + name.replace("_", "-")
