"""Settings of another project on their way to this one: flags of a run, and for each key of theirs what became of it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from rlflow.errors import PlanError, Problem

HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")  # the name of a model on the hub, which nothing is loaded from
PATHS = ("data", "eval", "model", "reward")  # last parts of flags that name files


@dataclass(frozen=True)
class Keys:
    """The keys of a project at one release."""

    project: str
    release: str
    defaults: Mapping[str, Any]  # of those that are taken
    neutral: Mapping[str, tuple[Any, ...]]  # of those that have no counterpart, values at which they change nothing, the default first
    meaningless: tuple[str, ...]  # patterns of those that decide where and how fast something runs, or what is logged

    def lists(self, key: str) -> list[str]:
        """The lists that a key is in: taken, unsupported, meaningless. Exactly one for each key of the release."""
        return [name for name, known in (("taken", key in self.defaults), ("unsupported", key in self.neutral),
                                         ("meaningless", any(fnmatchcase(key, each) for each in self.meaningless))) if known]  # fmt: skip


@dataclass
class Imported:
    """Settings on their way from another project."""

    keys: Keys
    source: Mapping[str, Any]  # the other project's settings, by key
    flow: str = ""  # what is made of them, with the flags
    flags: dict[str, Any] = field(default_factory=dict)
    counterparts: dict[str, str] = field(default_factory=dict)  # key that was given → the flag, or what it decided
    differs: dict[str, str] = field(default_factory=dict)  # a default of theirs → how it differs here
    unsupported: dict[str, str] = field(default_factory=dict)  # key that was given → why it has no counterpart
    by_hand: list[str] = field(default_factory=list)  # what the settings alone do not tell

    def value(self, key: str, says: str = "") -> Any:
        """The value of a key, given or by default; a given one is taken from here on."""
        if key in self.source and key not in self.unsupported:
            self.counterparts[key] = says or self.counterparts.get(key, "")
        return self.source.get(key, self.keys.defaults[key])

    def take(self, key: str, flag: str, change: Callable[[Any], Any] = lambda value: value) -> None:
        """Make a flag of a key. One without a value stays what it is here."""
        value = self.value(key, f"--{flag}")
        if value is not None and value != "":
            self.flags[flag] = change(value)

    def refuse(self, key: str, why: str) -> None:
        """A value that has no counterpart: not supported where it was given, and a difference where it is their default."""
        if key in self.source and self.source[key] != self.keys.defaults.get(key, self.keys.neutral.get(key, (None,))[0]):
            self.counterparts.pop(key, None)
            self.unsupported[key] = why
        else:
            self.differs[key] = why

    def judge_rest(self) -> None:
        """Refuse given keys that nothing took: those without a counterpart at other than neutral values, and unknown ones."""
        for key, value in self.source.items():
            lists = self.keys.lists(key)
            if not lists:
                self.unsupported[key] = f"no key of {self.keys.project} {self.keys.release}"
            elif lists == ["unsupported"] and value not in self.keys.neutral[key]:
                self.unsupported[key] = "rlflow has no counterpart"

    def finish(self) -> None:
        """Judge what no step has taken, and make the flags those of this machine."""
        self.judge_rest()
        self.flags = {flag: at_home(flag, value) for flag, value in self.flags.items()}
        for flag, value in self.flags.items():
            if flag.rpartition(".")[2] == "model" and HUB.fullmatch(value):
                self.by_hand.append(f"--{flag}: a folder, as of hf download {value} --local-dir FOLDER")

    def meaningless(self) -> list[str]:
        """The given keys that mean nothing here: how fast, where, with which logs, or at a value at which they change nothing."""
        return [key for key in self.source if key not in self.counterparts and key not in self.unsupported and key not in self.differs]

    def refusal(self, file: str) -> PlanError:
        """The error that names what is not supported."""
        return PlanError(*(Problem("import", f"{file}: {key} = {self.source[key]!r} is not supported", found=why,
                                  expected=f"settings of {self.keys.project} that rlflow has too",
                                  remedy=f"leave {key} out, or write the step into an algorithm: rlflow new NAME --from "
                                         f"{self.flow or 'grpo'}") for key, why in self.unsupported.items()))  # fmt: skip

    def report(self) -> Iterator[str]:
        """Lines that say of each key what became of it."""
        yield from _section("taken", {key: f"{says} ({_short(self.source[key])})" for key, says in self.counterparts.items()})
        yield from _section("differs", self.differs)
        yield from _section("not supported", self.unsupported)
        if rest := self.meaningless():
            yield f"meaningless here, or at values that change nothing: {', '.join(rest)}"
        yield from (f"by hand: {line}" for line in self.by_hand)

    def toml(self, out: str) -> str:
        """The configuration file, with the command that runs it."""
        lines = [f"# rlflow run {self.flow} --config {out}", f"# from settings of {self.keys.project} {self.keys.release}"]
        lines += [f"# differs: {key}: {how}" for key, how in self.differs.items()] + [f"# by hand: {line}" for line in self.by_hand]
        tables: dict[str, list[str]] = {"": []}
        for flag, value in self.flags.items():
            table, _, name = ("data.source" if flag == "data" else flag if "." in flag else f".{flag}").partition(".")
            tables.setdefault(table, []).append(f"{name} = {json.dumps(value, ensure_ascii=False)}")
        for table, rows in tables.items():
            lines += (["", f"[{table}]"] if table else []) + rows
        return "\n".join(lines) + "\n"


def at_home(flag: str, value: Any) -> Any:
    """The value with ``~`` as the user's folder where the flag names files."""
    if flag.rpartition(".")[2] not in PATHS:
        return value
    if isinstance(value, list):
        return [at_home(flag, each) for each in value]
    name, equals, path = value.rpartition("=")
    return f"{name}{equals}{os.path.expanduser(path)}"


def _section(title: str, rows: Mapping[str, str]) -> Iterator[str]:
    if rows:
        yield title
        yield from (f"  {key} -> {says}" for key, says in rows.items())


def _short(value: Any) -> str:
    return text if len(text := str(value)) <= 60 else f"{text[:57]}…"
