"""Read flags and configuration files into one flat mapping of dotted names to values, and sort it.

The values are sorted into options, data settings, flow settings and role settings.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from rlflow.author.settings import override
from rlflow.compiler.graph.model import SIDES
from rlflow.config.meant import SWITCHES, Known, belongs_nowhere, no_sampling, unknown_own
from rlflow.config.options import Options
from rlflow.config.sampling import addresses_call, repeatable, sampling_of
from rlflow.data.hub_names import HubName
from rlflow.errors import PlanError, Problem, listed, nearest
from rlflow.processes.addresses import Address
from rlflow.processes.declare import HEAD, Service, in_place, nowhere, split_services

REPEATED = ("data", "eval", "job.secret", "reward", "reward_env", "reward_write", "track")
OPTIONS = frozenset(f.name for f in fields(Options))
NULL = "null"  # the backend without models
SET = re.compile(r"(\w[\w.-]*)=(.+)", re.DOTALL)  # a held-out set, as --eval names it
ALIASES = {"data.source": "data", "env.class": "env"}  # because a TOML table [data] cannot also be a value
ROLE_KEYWORDS = ("model", "trainer", "generator", "reward", "pool", "trainer.pool", "generator.pool")


def parse_flags(arguments: Iterable[str]) -> dict[str, Any]:
    """Parse ``--name value`` and ``--name=value`` into a mapping of names to strings.

    A switch without a value becomes True, and a repeatable flag becomes a tuple. Raises PlanError for an
    invalid flag.
    """
    flags: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            raise PlanError.of(
                "flag", f"'{word}' is not a flag", found=word, expected="--NAME VALUE", remedy="see --help"
            )
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        if name in SWITCHES and not equals:
            flags[name] = True
            continue
        if not equals:
            if not words or words[0].startswith("--"):
                raise PlanError.of(
                    "flag",
                    f"--{name} has no value",
                    found=words[0] if words else "the end of the line",
                    expected="--NAME VALUE",
                    remedy=f"write --{name} VALUE (booleans take true or false)",
                )
            value = words.pop(0)
        _put(flags, name, value)
    return flags


def read_flags(arguments: Iterable[str]) -> dict[str, Any]:
    """Return a command's flags together with the values in its ``--config`` file.

    If both set a value, the flag wins. Raises PlanError if a flag or the file is invalid.
    """
    flags = parse_flags(arguments)
    file = flags.pop("config", None)
    return (read_toml(Path(file)) if file else {}) | flags


def _put(flags: dict[str, Any], name: str, value: str) -> None:
    if name in REPEATED or repeatable(name):
        flags[name] = (*flags.get(name, ()), value)
    elif name in flags:
        both = f"{flags[name]} and {value}"
        raise PlanError.of(
            "flag", f"--{name} is given twice", found=both, expected="one value", remedy="remove one"
        )
    else:
        flags[name] = value


def evaluation_names(written: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the held-out sets given with ``--eval NAME=FILE``.

    Values without a name are skipped.
    """
    return tuple(parts[1] for text in written if (parts := SET.fullmatch(str(text))))


def sort_rewards(values: Mapping[str, Any]) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Split the values of ``--reward`` into (rewards for training, rewards for a single held-out set).

    A reward for a held-out set is written REWARD@NAME, optionally with a weight, where NAME is the name of
    the set in ``--eval``. ``values`` holds all flags by name.
    """
    written = {name: values.get(name) or () for name in ("reward", "eval")}
    rewards, sets = ((value,) if isinstance(value, str) else tuple(value) for value in written.values())
    of_a_set = re.compile(f".*@({'|'.join(map(re.escape, evaluation_names(sets)))})(:[^:@/]*)?", re.DOTALL)
    judges = tuple(
        reward for reward in rewards if sets and isinstance(reward, str) and of_a_set.fullmatch(reward)
    )
    return tuple(reward for reward in rewards if reward not in judges), judges


def read_toml(path: Path) -> dict[str, Any]:
    """Read a configuration file into a flat mapping: ``lr`` in the table ``[actor]`` becomes ``actor.lr``.

    Raises PlanError if the file can't be read or isn't TOML.
    """
    try:
        return flat(tomllib.loads(path.read_text("utf-8")))
    except OSError as error:
        close = (
            nearest(path.name, [p.name for p in path.parent.glob("*.toml")]) if path.parent.is_dir() else None
        )
        raise PlanError.of(
            "config",
            f"the configuration file '{path}' cannot be read",
            found=str(error.strerror),
            expected="a TOML file",
            nearest=close,
            remedy="give the path of an existing file",
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError.of(
            "config",
            f"the configuration file '{path}' is not TOML",
            found=str(error),
            expected="TOML",
            remedy="correct the line",
        ) from error


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested mapping, joining names with dots.

    Repeatable settings become tuples. ``prefix`` is added in front of each name.
    """
    values: dict[str, Any] = {}
    for key, value in table.items():
        name = ALIASES.get(dotted := f"{prefix}{key}".replace("-", "_"), dotted)
        if isinstance(value, Mapping):
            values |= flat(value, f"{name}.")
        elif name in REPEATED:
            values[name] = (
                tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)
            )
        else:
            values[name] = value
    return values


@dataclass(frozen=True)
class RoleConfig:
    """A role's settings from flags, files and keywords, by name. Strings are not parsed yet."""

    name: str
    # by name, such as lr or generator.pool; role-specific settings override shared ones
    values: Mapping[str, Any]
    shared: frozenset[str]  # names given without a role, which apply to all roles
    trainer: str  # name of the trainer's backend
    generator: str  # name of the generator's backend

    @property
    def backends(self) -> dict[str, str]:
        """The backends of the trainer and the generator, by side."""
        return {"trainer": self.trainer, "generator": self.generator}

    def flag(self, name: str) -> str:
        """Return the flag that sets ``name``, without dashes: ``NAME`` if shared, else ``ROLE.NAME``."""
        return name if name in self.shared else f"{self.name}.{name}"


@dataclass(frozen=True)
class RunConfig:
    """The configuration of a run, sorted into options, data settings, flow settings and role settings."""

    options: Options  # options of the run itself
    # settings of the flow that are not at their defaults (--hp.NAME)
    hp: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)  # --data.NAME
    # role → settings for this role only (--ROLE.NAME)
    roles: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    every_role: Mapping[str, Any] = field(default_factory=dict)  # settings for all roles (--NAME)
    # all of the above by flag, unparsed; a run records them
    values: Mapping[str, Any] = field(default_factory=dict)
    own: tuple[str, ...] = ()  # names of all the flow's settings
    # call, such as actor.generate#2 → settings that override the flow
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # rewards that only score a set given with --eval; not in options.reward
    judges: tuple[str, ...] = ()
    # role, or "" for any role that samples → the environment's settings by name, and its class under ""
    environments: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # services of the run; their URLs are filled into everything above except ``values``
    services: tuple[Service, ...] = ()
    # service → its address; empty if services are not started
    places: Mapping[str, Address] = field(default_factory=dict)
    # folder of a model in the Hub's cache → the pinned name of the model
    models: Mapping[Path, HubName] = field(default_factory=dict)
    # flags that name something on the Hub, as the user wrote them; the pinned names are in ``values``
    written: Mapping[str, Any] = field(default_factory=dict)

    def role(self, name: str) -> RoleConfig:
        """Return one role's settings. Settings for this role override settings for all roles."""
        own = self.roles.get(name, {})
        values = {**self.every_role, **own}
        trainer, generator = (str(values.get(half) or self.options.backend) for half in SIDES)
        return RoleConfig(name, values, frozenset(self.every_role.keys()), trainer, generator)

    def with_option(self, name: str, value: Any) -> RunConfig:
        """Return a copy of the configuration in which one option has a new value."""
        return replace(
            self, options=replace(self.options, **{name: value}), values={**self.values, name: value}
        )

    @property
    def tokenizer_folder(self) -> str | None:
        """The folder of the tokenizer that encodes the data.

        This is --model or, if it isn't given, the model folder of the first role that has one. None if no
        role has one.
        """
        return self.options.model or next(
            (role["model"] for role in self.roles.values() if "model" in role), None
        )

    @property
    def service_variables(self) -> dict[str, str]:
        """The environment variables that tell rewards and environments the URLs of services."""
        return {each.variable: self.urls[each.name] for each in self.services}

    @property
    def urls(self) -> dict[str, str]:
        """The URL of each service, by name. Empty until the services have their addresses."""
        return {name: place.url for name, place in self.places.items()}

    @property
    def has_synthetic_scores(self) -> bool:
        """Whether the null backend makes up the scores because no reward is given."""
        return self.options.backend == NULL and not self.options.reward


def sort_values(
    values: Mapping[str, Any],
    roles: Iterable[str],
    settings: Any = None,
    urls: Callable[[Sequence[Service]], Mapping[str, str]] = nowhere,
    sampling: Callable[[], Sequence[str]] = no_sampling,
) -> RunConfig:
    """Sort a flat mapping of values into options, data settings, flow settings and role settings.

    ``settings``: the flow's settings with their defaults. ``urls``: a function that returns the URL of each
    service, by name. ``sampling``: a function that returns the roles that sample, used for suggestions.

    Placeholders such as {search} are replaced with the URLs of services, except in settings of the flow and
    of environments. Those are part of the graph: environments fill in the URLs in their own processes, and
    stages get them when they are called. Raises PlanError for unknown names. Names of backend settings are
    checked later, by ``setting_problems``.
    """
    written = values
    _check_texts(values)
    roles = list(roles)
    services, values = split_services(values)
    if services:
        there = urls(services)
        values = {
            name: value if _of_graph(name, roles) else in_place(value, there)
            for name, value in values.items()
        }
    known = Known(
        tuple(f.name for f in fields(settings)) if is_dataclass(settings) else (), tuple(roles), sampling
    )
    calls, problems = sampling_of({name: value for name, value in values.items() if _of_a_call(name, roles)})
    to = _Sorted(roles, known, problems)
    for name, value in values.items():
        to.add(name, value)
    PlanError.refuse(to.problems)
    to.options["pools"] = pools_of(values)
    rewards, judges = sort_rewards(to.options)
    if judges:
        to.options["reward"] = rewards
    return RunConfig(
        override(Options(), to.options, ""),
        to.hp,
        to.data,
        to.by_role,
        to.every_role,
        dict(written),
        known.own,
        calls,
        judges,
        to.environments,
        services,
    )


@dataclass
class _Sorted:
    """The values, sorted by the part of the configuration they belong to."""

    roles: list[str]
    known: Known
    problems: list[Problem]
    options: dict[str, Any] = field(default_factory=dict)
    hp: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    every_role: dict[str, Any] = field(default_factory=dict)
    by_role: dict[str, dict[str, Any]] = field(default_factory=dict)
    environments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, name: str, value: Any) -> None:
        """Put a value where it belongs, or record a problem if it belongs nowhere."""
        head, dot, rest = name.partition(".")
        if (environment := _of_environment(name, self.roles)) is not None:
            role, setting = environment
            self.environments.setdefault(role, {})[setting] = value
            self.options |= {"env": value} if name == "env" else {}
        elif not dot and name in OPTIONS:
            self.options[name] = (value,) if name in REPEATED and isinstance(value, str) else value
        elif not dot:
            self.every_role[name] = value
        elif head == "hp":
            self.hp[rest] = value
            self.problems += [unknown_own(rest, self.known)] if self._unknown(rest) else []
        elif head == "data":
            self.data[rest] = value
        elif head == "pools" or _of_a_call(name, self.roles):
            return
        elif head in self.roles:
            self.by_role.setdefault(head, {})[rest] = value
        else:
            self.problems.append(belongs_nowhere(name, ["hp", "data", HEAD, *self.roles], self.known))

    def _unknown(self, setting: str) -> bool:
        return bool(self.known.own) and setting not in self.known.own


def pools_of(values: Mapping[str, Any]) -> Any:
    """Return the pools as ``--pools`` takes them (NAME=RANKS,…), or None if there are no pools.

    A table [pools] in a configuration file is converted to this form.
    """
    table = [
        f"{name.removeprefix('pools.')}={ranks}"
        for name, ranks in values.items()
        if name.startswith("pools.")
    ]
    return ",".join(table) or values.get("pools")


def _check_texts(values: Mapping[str, Any]) -> None:
    """Raise PlanError if a string contains NUL.

    File names and environment variables can't contain it.
    """
    for name, value in values.items():
        if any(
            isinstance(each, str) and "\0" in each
            for each in (value if isinstance(value, list | tuple) else (value,))
        ):
            raise PlanError.of(
                "setting-range",
                f"the setting '{name}' does not fit",
                found=repr(value),
                expected="a text without the NUL character",
                remedy=f"change --{name}",
                setting=name,
            )


def _of_graph(name: str, roles: Iterable[str]) -> bool:
    """Whether a flag's value is part of the flow's graph, which a restart of the run must not change."""
    return name.startswith("hp.") or _of_environment(name, roles) is not None


def _of_environment(name: str, roles: Iterable[str]) -> tuple[str, str] | None:
    """Return (role, setting) if a flag belongs to an environment, or None. For ``--env``, the role is "".

    The flags of environments are env, env.NAME, ROLE.env and ROLE.env.NAME.
    """
    head, _, rest = name.partition(".")
    if head == "env":
        return "", rest
    if head in roles and rest.partition(".")[0] == "env":
        return head, rest.partition(".")[2]
    return None


def _of_a_call(name: str, roles: Iterable[str]) -> bool:
    """Whether a flag is a sampling setting of one of a role's `generate` calls."""
    head, _, rest = name.partition(".")
    return head in roles and addresses_call(rest)


def pool_flag_problems(roles: Iterable[str], config: RunConfig) -> list[Problem]:
    """If --pools is missing, return a problem that lists the flags that need it, else an empty list."""
    if config.options.pools:
        return []
    names = ("pool", "trainer.pool", "generator.pool")
    flags = [f"--{name}" for name in names if name in config.every_role]
    flags += [f"--{role}.{name}" for role in roles for name in names if name in config.roles.get(role, {})]
    flags += ["--ray-address"] if config.options.ray_address else []
    flags += ["--interface"] if config.options.interface else []
    if not flags:
        return []
    return [
        Problem(
            "no-pools",
            f"{flags[0]} is given without --pools",
            found=listed(flags),
            expected="--pools too; without it a run uses one process",
            remedy="--pools all=2, or leave it out",
        )
    ]
