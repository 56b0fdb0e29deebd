"""What importing another project's settings results in: flags for a run, and a report on every key."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib import metadata
from typing import Annotated, Any

from annotated_types import Ge, Len, Lt
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rlflow.cli.importers.script import unresolved
from rlflow.errors import Problem, listed, printable

# the name of a model on the Hugging Face hub; rlflow does not load models from the hub
PATHS = ("data", "eval", "model", "reward")  # last parts of the flags whose values are files
Whole = Annotated[int, Ge(-(2**63)), Lt(2**63)]
Pair = Annotated[list[float], Len(2, 2)]


@dataclass(frozen=True)
class Keys:
    """The keys for settings in one release of a project."""

    project: str
    release: str
    defaults: Mapping[str, Any]  # defaults of the keys that have a counterpart
    # for keys without a counterpart: values at which they have no effect, the default first
    neutral: Mapping[str, tuple[Any, ...]]
    # patterns of the keys that only affect placement, speed or logging
    meaningless: tuple[str, ...]
    # expected types of some keys with a counterpart, if they differ from the type of the default
    kinds: Mapping[str, Any] = field(default_factory=dict)
    earlier: tuple[str, ...] = ()  # further releases whose keys are known, in addition to ``release``

    def unknown_release(self, text: str) -> Problem | None:
        """Return a warning if the text is for a release whose keys rlflow doesn't know, else None.

        The release is the one that the text names like a pip requirement (``trl==1.16.0``,
        ``openrlhf[vllm]>=0.8``) or, if it names none, the one installed.
        """
        named = re.search(
            rf"\b{self.project}(?:\[[\w, ]*\])?\s*[=~>]=\s*v?(\d+(?:\.\d+)*)", text, re.IGNORECASE
        )
        release = named[1] if named else _installed(self.project)
        known = (self.release, *self.earlier)
        if not release or any(release == each or each.startswith(f"{release}.") for each in known):
            return None
        return Problem(
            "import-release",
            f"the keys of {self.project} {release} may differ from the keys that rlflow knows",
            found=f"{self.project} {release}, {'named in the file' if named else 'installed'}",
            expected=f"{self.project} {listed(known)}",
            remedy="compare each line of the report with that release's documentation",
            severity="warning",
        )

    def lists(self, key: str) -> list[str]:
        """Return which of the lists "taken", "unsupported" and "meaningless" a key is in.

        Every key of this release is in exactly one of them. A key of another release may be in none.
        """
        return [
            name
            for name, known in (
                ("taken", key in self.defaults),
                ("unsupported", key in self.neutral),
                ("meaningless", any(fnmatchcase(key, each) for each in self.meaningless)),
            )
            if known
        ]

    def wrong(self, key: str, value: Any) -> str:
        """Return what a key's value should look like if ``value`` is invalid, else "".

        Keys that rlflow ignores are never invalid.
        """
        if self.lists(key) == ["meaningless"]:
            return ""
        if unresolved(value):
            return "a value that is given in the file itself"
        if key not in self.defaults:
            return ""
        default = type(self.defaults[key])
        try:
            _adapter(self.kinds.get(key, Whole if default is int else default)).validate_python(value)
        except ValidationError as error:
            return " or ".join(
                dict.fromkeys(problem["msg"].removeprefix("Input should be ") for problem in error.errors())
            )
        return ""


@lru_cache(maxsize=64)
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return a validator for values of type ``kind``.

    Numbers must be finite. Booleans and strings don't count as numbers.
    """
    return TypeAdapter(kind, config=ConfigDict(strict=True, allow_inf_nan=False))


@dataclass
class Imported:
    """Another project's settings, with the counterparts found so far."""

    keys: Keys
    source: Mapping[str, Any]  # the other project's settings, by key
    flow: str = ""  # the algorithm of rlflow that corresponds to the settings
    flags: dict[str, Any] = field(default_factory=dict)
    # given key → the flag that it became, or the choice that it determined
    counterparts: dict[str, str] = field(default_factory=dict)
    # key whose default differs in rlflow → the difference
    differs: dict[str, str] = field(default_factory=dict)
    # given key → why it has no counterpart
    unsupported: dict[str, str] = field(default_factory=dict)
    by_hand: list[str] = field(default_factory=list)  # flags that cannot be derived from the settings alone
    # given key with an invalid value → the expected value
    wrong: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.wrong = {key: why for key, value in self.source.items() if (why := self.keys.wrong(key, value))}

    def value(self, key: str, says: str = "") -> Any:
        """Return a key's value, or its default if the key isn't given or its value is invalid.

        If the key is given, it is recorded as supported. ``says``: its counterpart in the report.
        """
        if key not in self.source or key in self.wrong:
            return self.keys.defaults[key]
        if key not in self.unsupported:
            self.counterparts[key] = says or self.counterparts.get(key, "")
        return self.source[key]

    def take(self, key: str, flag: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Set a flag from a key's value, converted by ``change``.

        If the value is None or empty, the flag isn't set, and rlflow's default applies.
        """
        value = self.value(key, f"--{flag}")
        if value is not None and value != "":
            self.flags[flag] = change(value)

    def refuse(self, key: str, why: str) -> None:
        """Record that rlflow has no counterpart for a key's value, and why.

        If the user changed the value from the project's default, it is reported as unsupported, otherwise as
        a difference.
        """
        if key in self.source and self.source[key] != self.keys.defaults.get(
            key, self.keys.neutral.get(key, (None,))[0]
        ):
            self.counterparts.pop(key, None)
            self.unsupported[key] = why
        else:
            self.differs[key] = why

    def check_rest(self) -> None:
        """Record keys as unsupported if they are unknown, or have an effect but no counterpart."""
        for key, value in self.source.items():
            lists = self.keys.lists(key)
            if key in self.wrong:
                continue
            if not lists:
                self.unsupported[key] = f"it is not a key of {self.keys.project} {self.keys.release}"
            elif lists == ["unsupported"] and value not in self.keys.neutral[key]:
                self.unsupported[key] = "rlflow has no counterpart"

    def finish(self) -> None:
        """Check the keys that haven't been used, and expand ``~`` in flags that name files."""
        self.check_rest()
        self.flags = {flag: expand_home(flag, value) for flag, value in self.flags.items()}

    def meaningless(self) -> list[str]:
        """Return the user's keys that have no effect in rlflow.

        They are about placement, speed or logging, or their value is neutral.
        """
        reported = {*self.counterparts, *self.unsupported, *self.differs, *self.wrong}
        return [key for key in self.source if key not in reported]

    def problems(self, file: str) -> list[Problem]:
        """Return a problem for each invalid value and each unsupported key.

        An unsupported key is only a warning if the other keys correspond to an algorithm. ``file``: the
        imported file's name in messages.
        """
        return [
            *(
                Problem(
                    "import",
                    f"{file}: {key} = {self._shown(key)} cannot be read",
                    found=self._shown(key),
                    expected=expected,
                    remedy=f"write a value for {key} into the file",
                )
                for key, expected in self.wrong.items()
            ),
            *(
                Problem(
                    "import",
                    f"{file}: {key} = {self._shown(key)} is not supported",
                    found=why,
                    expected=f"settings of {self.keys.project} that rlflow also has",
                    remedy=f"remove {key}, or {self._own_step}",
                    severity="warning" if self.flow else "error",
                )
                for key, why in self.unsupported.items()
            ),
        ]

    @property
    def _own_step(self) -> str:
        """What to do about a key without a counterpart."""
        return f"write the step into an algorithm of your own: rlflow new NAME --from {self.flow or 'grpo'}"

    def _shown(self, key: str) -> str:
        return _short(repr(self.source[key]))

    def report(self) -> Iterator[str]:
        """Yield the lines of the report: each key with its flag, its difference, or why it has no flag."""
        yield from _section(
            "taken", {key: f"{says} ({_short(self.source[key])})" for key, says in self.counterparts.items()}
        )
        yield from _section("differs", self.differs)
        yield from _section(
            "cannot be read",
            {key: f"{self._shown(key)}, expected {what}" for key, what in self.wrong.items()},
        )
        yield from _section("not supported", self.unsupported)
        if rest := self.meaningless():
            yield f"no effect here: {', '.join(rest)}"
        yield from (f"by hand: {line}" for line in self.by_hand)

    def toml(self, out: str) -> str:
        """Return the configuration file, starting with the command that runs it. ``out``: the file's path."""
        lines = [
            f"# rlflow run {self.flow} --config {out}",
            f"# from settings of {self.keys.project} {self.keys.release}",
        ]
        lines += [
            f"# not supported: {key} = {self._shown(key)}: {why}; {self._own_step}"
            for key, why in self.unsupported.items()
        ]
        lines += [f"# differs: {key}: {how}" for key, how in self.differs.items()] + [
            f"# by hand: {line}" for line in self.by_hand
        ]
        tables: dict[str, list[str]] = {"": []}
        for flag, value in self.flags.items():
            table, _, name = (
                "data.source" if flag == "data" else flag if "." in flag else f".{flag}"
            ).partition(".")
            tables.setdefault(table, []).append(f"{name} = {_written(value)}")
        lines = [printable(line, keep="") for line in lines]
        for table, rows in tables.items():
            lines += (["", f"[{table}]"] if table else []) + rows
        return "\n".join(lines) + "\n"


def _installed(project: str) -> str:
    """Return the release of a project that is installed, or ""."""
    try:
        return metadata.version(project.lower())
    except metadata.PackageNotFoundError:
        return ""


def expand_home(flag: str, value: Any) -> Any:
    """Expand ``~`` in a flag's value if the flag names files."""
    if flag.rpartition(".")[2] not in PATHS:
        return value
    if isinstance(value, list):
        return [expand_home(flag, each) for each in value]
    name, equals, path = value.rpartition("=")
    return f"{name}{equals}{os.path.expanduser(path)}"


def _section(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    if rows:
        yield title
        yield from (f"  {key} -> {says}" for key, says in rows.items())


def _written(value: Any) -> str:
    """Return a value as TOML, which for these values is JSON except for one control character.

    Raises ValueError for a number that isn't finite.
    """
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 60 else f"{text[:57]}…"
