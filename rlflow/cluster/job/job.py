"""Job: the roles of a job, the resources of their ranks, and the start and end of their processes.

A role is a class that the user writes. All processes start with the ``with`` block and end with it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from types import TracebackType
from typing import Any, Self, TypeVar

from rlflow.author.source_lines import call_place
from rlflow.cluster.job.job_roles import Group
from rlflow.cluster.job.job_start import JobOptions, RoleStart, Started, start
from rlflow.cluster.job.rank_layout import Layout, Need, RoleNeeds, counted, laid, parts
from rlflow.cluster.rpc.pool import Pool
from rlflow.errors import FlowError, Problem, listed, nearest

W = TypeVar("W")


@dataclass(frozen=True)
class JobRole:
    """A role as declared by the user."""

    needs: RoleNeeds
    kind: type
    distributed: bool
    env: Mapping[str, str]
    arguments: Mapping[str, Any]


@dataclass(eq=False)
class Job:
    """Groups of worker processes that run your own classes.

    ``with job:`` starts the workers. They end with the block, even after an error.
    """

    name: str
    env: Mapping[str, str] = field(default_factory=dict)  # environment variables of every rank
    # the Ray cluster to join, auto or HOST:PORT, or None to start one on this machine
    address: str | None = None
    seconds: float = 600.0  # time limit to make the objects of all ranks
    heartbeat: float = 15.0  # seconds without a heartbeat after which a rank is killed, or 0 for never
    threads: int = 0  # threads of each rank; 0: this machine's processors divided by the ranks
    interface: str | None = None  # as the flag of `rlflow run` with this name
    insecure: bool = False  # as the flag of `rlflow run` with this name

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
        """Declare a role: ``ranks`` objects of the class ``kind``, each in its own process. Return its group.

        ``per_node``: the number of ranks on each node (the last node may get fewer), or 0 to allow any
        placement. ``cpus``, ``gpus``: the CPUs and GPUs of each rank, as a whole number or a fraction below
        1. ``distributed``: whether the ranks join a torch process group before the objects are created.
        ``env``: environment variables that override the job's. ``arguments``: keyword arguments for the
        class. Raises FlowError for invalid arguments, and PlanError for fractions that Ray can't represent.
        """
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
                f"job '{self.name}' is already running",
                f"role '{name}'",
                "roles declared before the `with` block",
                "",
            )
        if not name.isidentifier() or name in self._roles:
            raise _misuse(
                "job-role",
                f"'{name}' cannot name a new role",
                f"roles {listed(self._roles)}",
                "a new name that is a Python identifier",
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
                "pass arguments={'NAME': VALUE} that fit the class",
            ) from None

    def collocate(self, *groups: Group[Any]) -> None:
        """Place roles together: rank k of each is on the same node, and on the same GPU if it uses one.

        A role with a fraction in ``gpus`` gets that share of the GPU. The other roles divide the rest
        equally. Raises PlanError if the roles don't fit together.
        """
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
        """Return the layouts of all roles, in the order they were declared.

        Collocated roles share one layout, which stands in the place of the role declared first.
        """
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
                    (
                        f"  {' and '.join(layout.needs)} share: rank k of each is placed in a bundle of "
                        f"{layout.bundle}{_left_over(layout)}"
                    )
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
        # only names, because values may be secrets
        words += [f"with {', '.join(role.env)} set"] if role.env else []
        return ", ".join(words)

    # -- running
    # --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Start the workers, and wait until their objects have been created.

        If there's no room or an object can't be created, all started processes are ended and PlanError is
        raised.
        """
        if self._started is not None or not self._roles:
            raise _misuse(
                "job-start",
                f"job '{self.name}' cannot start",
                "it is running" if self._roles else "it has no role",
                "a job with roles that is not running",
                "declare a role with job.role(NAME, CLASS)",
            )
        threads = self.threads or max(
            (os.cpu_count() or 1) // sum(role.needs.ranks for role in self._roles.values()), 1
        )
        options = JobOptions(
            self.name, self.address, self.seconds, self.heartbeat, threads, self.interface, self.insecure
        )
        roles = {
            name: RoleStart(role.kind, role.arguments, role.env, role.distributed)
            for name, role in self._roles.items()
        }
        with ExitStack() as over:
            started = start(options, roles, self.layouts(), over)
            started.watch()
            self._started, self._over = started, over.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._started = None
        self._over.close()

    def pool(self, role: str) -> Pool[Any]:
        """Return a role's pool. Raises FlowError if the job isn't running."""
        if self._started is None:
            raise _misuse(
                "job-runs",
                f"job '{self.name}' is not running",
                f"a call of role '{role}'",
                "a call in its `with` block",
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
            "an environment variable is not a string",
            listed(map(str, wrong)),
            "names and values that are strings",
            "convert it with str(value)",
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
