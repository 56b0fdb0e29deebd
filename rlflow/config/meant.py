"""Report unknown flags, and suggest the flags that were probably meant."""

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
    """Return no roles. Used where the flow isn't known."""
    return ()


@dataclass(frozen=True)
class Known:
    """The names in a flow that flags can refer to."""

    own: tuple[str, ...] = ()  # its settings, without the prefix hp.
    roles: tuple[str, ...] = ()
    # returns the roles that sample
    sampling: Callable[[], Sequence[str]] = field(default=no_sampling, compare=False)


def unknown_flag(name: str, settings: Iterable[str], known: Known) -> Problem:
    """Return the problem for a flag without a role (--NAME) that neither the run nor its backends know.

    ``settings``: the settings of the backends.
    """
    return Problem(
        "unknown-flag",
        f"there is no flag {dashed(name)}",
        found=dashed(name),
        expected="a flag of the run, or of a backend",
        setting=name,
        **_remedy(meant(name, settings, known)),
    )


def unknown_setting(role: str, name: str, settings: Iterable[str], known: Known) -> Problem:
    """Return the problem for a flag --ROLE.NAME if neither of the role's backends has this setting.

    ``settings``: the settings of these backends.
    """
    settings = sorted(settings)
    half, dot, rest = name.rpartition(".")
    fitting = [each.removeprefix(half + dot) for each in settings if each.startswith(half + dot)]
    return Problem(
        "unknown-setting",
        f"role '{role}' has no setting '{name}'",
        found=f"--{role}.{name}",
        setting=f"{role}.{name}",
        expected=f"one of {listed(settings)}",
        **_remedy(meant(rest, fitting, known, f"{role}.{half}" if half else role)),
    )


def unknown_own(name: str, known: Known) -> Problem:
    """Return the problem for a flag --hp.NAME if the flow has no such setting."""
    return Problem(
        "unknown-setting",
        f"there is no setting 'hp.{name}'",
        found=name,
        setting=f"hp.{name}",
        expected=f"one of {listed(known.own)}",
        **_remedy(meant(name, (), known)),
    )


def belongs_nowhere(name: str, heads: Sequence[str], known: Known) -> Problem:
    """Return the problem for a dotted flag whose first part is unknown.

    ``heads``: the possible first parts. If the last part is a setting in another project, the message
    suggests rlflow's flag for it.
    """
    head, _, rest = name.partition(".")
    near = nearest(head, heads)
    flag = f"--{near}.{rest}" if near else meant(rest.rpartition(".")[2], (), known)
    return Problem(
        "unknown-flag",
        f"--{name} names nothing in this flow",
        found=head,
        setting=name,
        expected=f"one of {listed(heads)} before the dot",
        **_remedy(flag),
    )


def _remedy(flag: str | None) -> dict[str, Any]:
    """Return the keyword arguments of a problem that suggests ``flag``."""
    first = f"write {flag} if you mean it; " if flag else ""
    return {"nearest": flag, "remedy": f"{first}--help lists all flags of this flow"}


def meant(name: str, settings: Iterable[str], known: Known, role: str = "") -> str | None:
    """Return the flag that was probably meant, or None if no name is similar.

    The most similar name wins. In a tie, settings of the flow come first, then those of `generate`, of the
    run and of backends, and last the names that other projects use. If another project's setting takes
    several flags here, all of them are returned in one string; if it has no equivalent in this flow, the
    result is None. ``settings``: the settings of backends. ``role``: the role that the flag was given for,
    optionally with a side, such as ``actor.trainer``.
    """
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
        """Yield all names that a misspelt flag could mean. In a tie, the first is suggested."""
        yield from (f"hp.{name}" for name in self.known.own)
        yield from (f"generate.{name}" for name in TYPES)
        yield from (*OF_THE_RUN, *sorted(name for name in self.settings if "." not in name), *SETTINGS)

    def word(self, name: str) -> str | None:
        """Return rlflow's flag for another project's setting, or None if this flow has no such flag.

        If it takes several flags, they are joined by "and".
        """
        for flags in SETTINGS.get(name, ()):
            each = [self.flag(flag) for flag in flags.split(" + ")]
            if all(each):
                return " and ".join(filter(None, each))
        return None

    def flag(self, name: str) -> str | None:
        """Return the flag for a setting, or None if neither the flow nor the run has this setting."""
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
    """Return a name as a flag: ``save_every`` becomes --save-every. Dotted names keep their underscores."""
    return f"--{name}" if "." in name else "--" + name.replace("_", "-")
