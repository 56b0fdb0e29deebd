"""Job: roles that are classes of the user, what their ranks need, and their life: nothing is started before
the block, nothing is left after it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from types import TracebackType
from typing import Any, TypeVar

from rlflow.author.source_lines import call_place
from rlflow.cluster.job.job_roles import Group
from rlflow.cluster.job.job_start import RoleStart, Started, Terms, start
from rlflow.cluster.job.rank_layout import Layout, Need, RoleNeeds, counted, laid, parts
from rlflow.cluster.rpc.pool import Pool
from rlflow.errors import FlowError, Problem, listed, nearest

W = TypeVar("W")


@dataclass(frozen=True)
class JobRole:
    """A role as it was declared."""

    needs: RoleNeeds
    kind: type
    distributed: bool
    env: Mapping[str, str]
    arguments: Mapping[str, Any]


@dataclass(eq=False)
class Job:
    """Groups of workers with roles of one's own. In ``with job:`` the workers are there; however the block
    ends, they end."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)  # variables of the environment of every rank
    # a running Ray to join, auto or HOST:PORT; None: one is started on this machine
    address: str | None = None
    seconds: float = 600.0  # how long the ranks may take to be made
    heartbeat: float = 15.0  # seconds for which a rank may be silent before it is killed; 0: never
    threads: int = 0  # of each rank; 0: the processors of this machine over all ranks
    interface: str | None = None  # as the flag of a run of this name says
    insecure: bool = False  # as the flag of a run of this name says

    def __post_init__(self) -> None:
        self._roles: dict[str, JobRole] = {}
        self._together: list[tuple[str, ...]] = []
        self._started: Started | None = None
        self._over = ExitStack()
        _check_env(self.env)

    # -- declaring
    # --------------------------------------------------------------------------------------------------------

    def role(
        self,
        name: str,
        kind: type[W],
        *,
        ranks: int = 1,
        per_node: int = 0,
        cpus: float | Fraction = 1,
        gpus: float | Fraction | None = None,
        distributed: bool = False,
        env: Mapping[str, str] | None = None,
        arguments: Mapping[str, Any] | None = None,
    ) -> Group[W]:
        """Declare a role: ``ranks`` objects of a class, each in a process of its own, made with
        ``arguments``. Gives the group to call.

        ``per_node``: so many ranks on each node, on the last one the rest; 0: wherever there is room.
        ``cpus``, ``gpus``: of each rank, whole numbers or a part of one. ``distributed``: the ranks join
        torch's process group before the objects are made. ``env``:
        variables over those of the job. Raises FlowError for what cannot be meant, PlanError for parts that
        cannot be had."""
        self._check_new(name, kind, ranks, per_node, arguments or {})
        _check_env(env or {})
        gpu = None if gpus is None else parts(gpus, f"gpus of role '{name}'")
        needs = RoleNeeds(name, ranks, parts(cpus, f"cpus of role '{name}'"), gpu, per_node)
        self._roles[name] = JobRole(
            needs, kind, distributed, {**self.env, **(env or {})}, dict(arguments or {})
        )
        return Group(self, name, kind, ranks, distributed)

    def _check_new(
        self, name: str, kind: type, ranks: int, per_node: int, arguments: Mapping[str, Any]
    ) -> None:
        if self._started is not None:
            raise _misuse(
                "job-runs",
                f"job '{self.name}' runs already",
                f"role '{name}'",
                "roles that are declared before the block",
                "",
            )
        if not name.isidentifier() or name in self._roles:
            raise _misuse(
                "job-role",
                f"'{name}' names no new role",
                f"roles {listed(self._roles)}",
                "a new name, as of a variable",
                "",
            )
        if not isinstance(kind, type):
            raise _misuse(
                "job-class", f"role '{name}' needs a class", type(kind).__name__, "the class itself", ""
            )
        if ranks < 1 or per_node < 0:
            raise _misuse(
                "job-ranks",
                f"role '{name}' needs ranks",
                f"ranks={ranks}, per_node={per_node}",
                "at least 1 rank",
                "",
            )
        try:
            inspect.signature(kind).bind(**arguments)
        except TypeError as error:
            raise _misuse(
                "job-arguments",
                f"{kind.__name__} of role '{name}': {error}",
                f"arguments {listed(arguments)}",
                f"{kind.__name__}{inspect.signature(kind)}",
                "arguments={'NAME': VALUE} of the class",
            ) from None

    def collocate(self, *groups: Group[Any]) -> None:
        """Have roles share bundles: rank k of each lies on one node, and where they use GPUs on one GPU.
        Parts that ``gpus`` names are kept, of the rest each has an equal share; all shares are exact. Raises
        PlanError where they do not fit together."""
        names = tuple(group.role for group in groups)
        strange = [group.role for group in groups if group.job is not self]
        again = [name for name in names if any(name in each for each in self._together)]
        if strange or again or len(set(names)) != len(names) or len(names) < 2:
            raise _misuse(
                "job-collocated",
                "these roles cannot be collocated",
                listed(names),
                "several roles of this job, each once",
                "",
            )
        laid([self._roles[name].needs for name in names])
        self._together.append(names)

    def layouts(self) -> list[Layout]:
        """The bundles of all roles, in the order in which the first role of each was declared."""
        of_role = {name: names for names in self._together for name in names}
        sets = dict.fromkeys(of_role.get(name, (name,)) for name in self._roles)
        return [laid([self._roles[name].needs for name in names]) for names in sets]

    def __str__(self) -> str:
        layouts = self.layouts()
        ranks = sum(role.needs.ranks for role in self._roles.values())
        lines = [f"job '{self.name}': {_count(ranks, 'rank')} of {_count(len(self._roles), 'role')}"]
        for layout in layouts:
            lines += [f"  {name}: {self._described(name, layout.needs[name])}" for name in layout.needs]
            lines += (
                [
                    f"  {' and '.join(layout.needs)} share: rank k of each lies in a bundle of "
                    f"{layout.bundle}{_left_over(layout)}"
                ]
                if len(layout.needs) > 1
                else []
            )
            lines += [f"  nodes: {_blocks(layout)}"] if layout.per_node else []
        total = Need(
            sum(each.bundle.cpus * each.ranks for each in layouts),
            sum(each.bundle.gpus * each.ranks for each in layouts),
        )
        return "\n".join([*lines, f"  in all {total}, on {self.address or 'this machine'}"])

    def _described(self, name: str, need: Need) -> str:
        role = self._roles[name]
        words = [f"{_count(role.needs.ranks, 'rank')} of {role.kind.__name__}, each with {need}"]
        words += ["in torch's group"] if role.distributed else []
        words += [f"with {', '.join(role.env)} set"] if role.env else []  # names alone: values may be secrets
        return ", ".join(words)

    # -- running
    # --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Job:
        """Start the workers, and wait until their objects are made. Raises PlanError where there is no room,
        or an object cannot be made; nothing is left then."""
        if self._started is not None or not self._roles:
            raise _misuse(
                "job-start",
                f"job '{self.name}' cannot start",
                "it runs" if self._roles else "it has no role",
                "a job with roles that does not run",
                "job.role(NAME, CLASS) declares a role",
            )
        threads = self.threads or max(
            (os.cpu_count() or 1) // sum(role.needs.ranks for role in self._roles.values()), 1
        )
        terms = Terms(
            self.name, self.address, self.seconds, self.heartbeat, threads, self.interface, self.insecure
        )
        roles = {
            name: RoleStart(role.kind, role.arguments, role.env, role.distributed)
            for name, role in self._roles.items()
        }
        with ExitStack() as over:
            started = start(terms, roles, self.layouts(), over)
            started.watch()
            self._started, self._over = started, over.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started = None
        self._over.close()

    def pool(self, role: str) -> Pool[Any]:
        """The ranks of a role. Raises FlowError where the job does not run."""
        if self._started is None:
            raise _misuse(
                "job-runs",
                f"job '{self.name}' does not run",
                f"a call of role '{role}'",
                "a call in its block",
                f"with {nearest(self.name, ['job']) or 'job'}: …",
            )
        return self._started.pools[role]


def _check_env(env: Mapping[str, str]) -> None:
    wrong = [
        name
        for name, value in env.items()
        if not isinstance(name, str) or not isinstance(value, str) or not name or "=" in name
    ]
    if wrong:
        raise _misuse(
            "job-env",
            "a variable of the environment is no text",
            listed(map(str, wrong)),
            "names and values that are texts",
            "str(value)",
        )


def _misuse(code: str, message: str, there: str, expected: str, remedy: str) -> FlowError:
    return FlowError(Problem(code, message, call_place(), None, there, expected, None, remedy))


def _left_over(layout: Layout) -> str:
    left = layout.bundle.gpus - sum(need.gpus for need in layout.needs.values())
    return f"; {counted(left, 'GPU')} of it is left over" if left else ""


def _blocks(layout: Layout) -> str:
    blocks: Sequence[int] = layout.blocks()
    return (
        f"{len(blocks)}, with {', '.join(map(str, dict.fromkeys(blocks)))} of {' and '.join(layout.needs)} "
        "on each"
    )


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
