"""The rules for environments, with the problem for each violation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rlflow.author.columns import Kind, Level
from rlflow.compiler.graph.model import Graph, Node, Op
from rlflow.errors import Place, Problem, listed, nearest

if TYPE_CHECKING:
    from rlflow.rewards.environments.environment_spec import EnvironmentSpec


ONE_PER_ROW = (Level.TEXT, Level.ROW, Level.GROUP, Level.SCALAR)


def environment_missing(
    environment: EnvironmentSpec,
    name: str,
    columns: Sequence[str],
    place: Place | None,
    fields: Sequence[str],
) -> Problem:
    """Return the problem of an environment whose ``reset`` reads something that the prompts don't have.

    ``columns``, ``fields``: the prompts' columns, and the fields in the data's file.
    """
    close = nearest(name, [*columns, *fields])
    return Problem(
        "missing-column",
        f"the environment {environment.name} reads '{name}', but the prompts do not have it",
        place,
        environment.place,
        found=f"columns {listed(columns)}" + (f"; fields of the data {listed(fields)}" if fields else ""),
        expected=f"column '{name}', or a field of the data of that name",
        nearest=close,
        remedy=f"map a field of the data: --data.{name} FIELD; or give the parameter of reset a default",
    )


def environment_kind(environment: EnvironmentSpec, name: str, kind: Kind, place: Place | None) -> Problem:
    """Return the problem of an environment whose ``reset`` reads a column without one value per row."""
    return Problem(
        "wrong-kind",
        f"the environment {environment.name} reads column '{name}', which is not a row column",
        place,
        environment.place,
        found=f"{name}: {kind}",
        expected="text, or one number per row",
        remedy="read the text of the prompt",
    )


def environment_settings(
    environment: EnvironmentSpec, lengths: Sequence[int], what: str, place: Place | None
) -> Iterator[Problem]:
    """Yield a problem if a `generate` call has both ``lengths`` and an environment.

    An environment decides itself when its episodes end.
    """
    if lengths:
        yield Problem(
            "env-lengths",
            f"{what} has recorded lengths and the environment {environment.name}",
            place,
            environment.place,
            found="lengths",
            expected="one of the two: an environment decides how long its episodes are",
            remedy="remove lengths",
        )


def environment_roles(
    graph: Graph, environments: Mapping[str, EnvironmentSpec], nodes: Iterable[Node]
) -> Iterator[Problem]:
    """Yield a problem for each ``--env`` flag that is ambiguous or whose role doesn't sample."""
    sampling = list(dict.fromkeys(node.role or "" for node in nodes if node.op is Op.GENERATE))
    for role, environment in environments.items():
        unnamed = [each for each in sampling if each not in environments]
        if not role and len(unnamed) > 1:
            yield Problem(
                "env-role",
                f"several roles sample, and --env does not name the role that {environment.name} answers",
                definition=environment.place,
                found=listed(unnamed),
                expected="an environment with the name of its role",
                remedy=f"--{unnamed[0]}.env instead of --env",
            )
        if role not in sampling if role else not sampling:
            yield Problem(
                "env-role",
                f"role '{role}' does not sample, so no environment can answer it"
                if role
                else f"flow '{graph.name}' does not sample, so no environment can answer",
                definition=environment.place,
                found=f"roles that sample: {listed(sampling)}",
                expected="a role that samples",
                nearest=nearest(role, sampling),
                remedy=f"--{sampling[0]}.env" if sampling else "remove --env",
            )
