"""The resources of a job's ranks, and their placement in bundles. This module starts nothing.

Ray counts fractions of a device in ten-thousandths. This module uses integers in the same unit, so that the
shares add up exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from rlflow.compiler.placement import GRAIN
from rlflow.errors import PlanError

Bundle = dict[str, float]  # resource → amount, in Ray's form


class Need(NamedTuple):
    """The resources of one rank, in ten-thousandths of a CPU and of a GPU."""

    cpus: int
    gpus: int

    def resources(self) -> Bundle:
        """Return the resources as Ray expects them, such as ``{"CPU": 1.0, "GPU": 0.5}``."""
        return {name: parts / GRAIN for name, parts in (("CPU", self.cpus), ("GPU", self.gpus)) if parts}

    def __str__(self) -> str:
        return (
            " and ".join(
                counted(parts, name) for name, parts in (("CPU", self.cpus), ("GPU", self.gpus)) if parts
            )
            or "nothing"
        )


@dataclass(frozen=True)
class RoleNeeds:
    """A role's resources, as declared by the user."""

    name: str
    ranks: int
    cpus: int = GRAIN
    gpus: int | None = None  # None if no number was given
    per_node: int = 0  # ranks on each node; 0 for any number


@dataclass(frozen=True)
class Layout:
    """The bundles for a role, or for several roles that are placed together.

    Bundle k has the resources for rank k of each role.
    """

    needs: Mapping[str, Need]  # role → the part of a bundle that its rank uses
    bundle: Need
    ranks: int
    per_node: int = 0

    def blocks(self) -> list[int]:
        """Return the number of bundles on each node, or [] if Ray may choose the placement."""
        if not self.per_node:
            return []
        whole, rest = divmod(self.ranks, self.per_node)
        return [self.per_node] * whole + [rest] * bool(rest)


def parts(amount: float | Fraction, what: str) -> int:
    """Convert an amount of a device to ten-thousandths. ``what``: how an error message begins.

    Raises PlanError if the amount is negative, has more than four decimals, or is above 1 but not whole.
    """
    exact = Fraction(str(amount)) if isinstance(amount, float) else Fraction(amount)
    count = exact * GRAIN
    if count.denominator != 1 or exact < 0 or (exact > 1 and exact.denominator != 1):
        raise PlanError.of(
            "job-share",
            f"{what} cannot be allocated",
            found=str(amount),
            expected="a whole number, or a number below 1 with at most four decimals",
            remedy="leave it out to get an equal share of the device that collocated roles use",
        )
    return int(count)


def counted(amount: int, name: str) -> str:
    """Format an amount given in ten-thousandths of a device, such as ``2 CPUs`` or ``0.5 GPU``."""
    number = f"{Fraction(amount, GRAIN).limit_denominator(GRAIN).__float__():.4f}".rstrip("0").rstrip(".")
    return f"{number} {name}{'s' if amount > GRAIN else ''}"


def shares(whole: int, count: int) -> list[int]:
    """Return ``count`` integers that add up to ``whole`` and differ by at most one."""
    share, over = divmod(whole, count)
    return [share + (number < over) for number in range(count)]


def laid(roles: Sequence[RoleNeeds]) -> Layout:
    """Return the layout of one role, or of several collocated roles.

    Raises PlanError if the roles can't be placed together.
    """
    _check_ranks(roles)
    gpus = _gpus(roles) if len(roles) > 1 else [roles[0].gpus or 0]
    needs = {role.name: Need(role.cpus, gpu) for role, gpu in zip(roles, gpus, strict=True)}
    bundle = Need(
        sum(need.cpus for need in needs.values()),
        -(-sum(gpus) // GRAIN) * GRAIN if len(roles) > 1 else gpus[0],
    )
    return Layout(needs, bundle, roles[0].ranks, max(role.per_node for role in roles))


def _check_ranks(roles: Sequence[RoleNeeds]) -> None:
    who = ", ".join(f"{role.name}: {role.ranks}" for role in roles)
    if len({role.ranks for role in roles}) > 1:
        raise PlanError.of(
            "job-collocated",
            "collocated roles have different numbers of ranks",
            found=who,
            expected="the same number, because rank k of each is placed in bundle k",
            remedy="give them the same ranks=",
        )
    if len({role.per_node for role in roles if role.per_node}) > 1:
        raise PlanError.of(
            "job-collocated",
            "collocated roles have different numbers of ranks per node",
            found=", ".join(f"{role.name}: {role.per_node}" for role in roles),
            expected="one per_node for all of them",
            remedy="set per_node= for only one of them",
        )


def _gpus(roles: Sequence[RoleNeeds]) -> list[int]:
    """Return each role's share of the GPU that rank k of all these roles uses, in ten-thousandths.

    A role with a fraction in ``gpus`` gets that share. The other roles divide the rest equally.
    """
    wants = [role.gpus for role in roles]
    if max((want or 0 for want in wants), default=0) > GRAIN:
        raise PlanError.of(
            "job-collocated",
            "a rank with several GPUs cannot share them",
            found=", ".join(f"{role.name}: {counted(role.gpus or 0, 'GPU')}" for role in roles),
            expected="at most 1 GPU for each rank of collocated roles",
            remedy="use more ranks with gpus=1",
        )
    if not any(wants):
        return [0] * len(roles)
    sharing = [number for number, want in enumerate(wants) if want is None or want == GRAIN]
    named = sum(want for want in wants if want and want < GRAIN)
    if named > GRAIN or GRAIN - named < len(sharing):
        raise PlanError.of(
            "job-share",
            "the shares of one GPU add up to more than 1",
            found=", ".join(
                f"{role.name}: {'the rest' if number in sharing else counted(role.gpus or 0, 'GPU')}"
                for number, role in enumerate(roles)
            ),
            expected="at most 1 in all",
            remedy="use a smaller gpus=, or leave it out to get equal shares",
        )
    rest = dict(zip(sharing, shares(GRAIN - named, len(sharing)), strict=True)) if sharing else {}
    return [rest.get(number, want or 0) for number, want in enumerate(wants)]


# -- checking for room


def check_room(layouts: Iterable[Layout], nodes: Sequence[Mapping[str, float]]) -> None:
    """Raise PlanError if the layouts don't fit on empty nodes with these resources.

    This checks the total of all layouts against the total of all nodes, and each layout by itself against the
    nodes. ``nodes``: the resources of each node.
    """
    layouts = list(layouts)
    have = [Need(round(node.get("CPU", 0) * GRAIN), round(node.get("GPU", 0) * GRAIN)) for node in nodes]
    total = Need(sum(node.cpus for node in have), sum(node.gpus for node in have))
    wanted = Need(
        sum(each.bundle.cpus * each.ranks for each in layouts),
        sum(each.bundle.gpus * each.ranks for each in layouts),
    )
    if wanted.cpus > total.cpus or wanted.gpus > total.gpus:
        raise _no_room("the roles need more than the cluster has", str(wanted), have)
    for layout in layouts:
        if not _fits(layout, have):
            where = f", {layout.per_node} on a node" if layout.per_node else ""
            raise _no_room(
                f"role {', '.join(map(repr, layout.needs))} does not fit on nodes of this size",
                f"{layout.ranks} times {layout.bundle}{where}",
                have,
            )


def _fits(layout: Layout, nodes: Sequence[Need]) -> bool:
    room = sorted((_times(layout.bundle, node, layout.ranks) for node in nodes), reverse=True)
    blocks = layout.blocks()
    if not blocks:
        return sum(room) >= layout.ranks
    return len(room) >= len(blocks) and all(have >= block for have, block in zip(room, blocks, strict=False))


def _times(bundle: Need, node: Need, most: int) -> int:
    """Return how many bundles fit on a node, up to ``most``."""
    return min([most, *(have // need for have, need in zip(node, bundle, strict=True) if need)])


def _no_room(message: str, wanted: str, nodes: Sequence[Need]) -> PlanError:
    return PlanError.of(
        "no-room",
        message,
        found="; ".join(f"a node with {node}" for node in nodes) or "no node",
        expected=wanted,
        remedy="use fewer ranks, smaller needs or a larger cluster",
    )
