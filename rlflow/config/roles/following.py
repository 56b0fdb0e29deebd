"""The rules for roles that follow another: what can be found out before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterator

from rlflow.compiler.placement import Placement
from rlflow.config.footprint import facts
from rlflow.config.roles.bound import BoundRole, BoundSide, Roles
from rlflow.errors import Problem
from rlflow.training.protocols import ShowsMasters


def follow_problems(roles: Roles, placement: Placement | None) -> Iterator[Problem]:
    """Yield a problem for each role whose trainer can't follow the trainer of the other role."""
    for role in roles.values():
        other = roles.get(role.use.follows or "")
        if other is None:
            continue
        lacking = [each for each in (role, other) if not each.trainer.offers(ShowsMasters)]
        if lacking:
            yield from map(_backend_problem, lacking)
        elif (differing := _differing(role, other)) is not None:
            yield _model_problem(role, other, differing)
        elif _together(role, other, placement) and not _alike(role.trainer, other.trainer):
            yield _layout_problem(role, other)


def _together(role: BoundRole, other: BoundRole, placement: Placement | None) -> bool:
    """Return True if both trainers are on the same ranks."""
    return placement is None or placement.trainers[role.name] == placement.trainers[other.name]


def _alike(own: BoundSide, other: BoundSide) -> bool:
    """Return True if each rank has the same parts of both trainers' weights, or all of the other's."""
    can, its = own.can, other.can
    if its.divided is not None and "weights" not in its.divided:
        return True
    return own.kind is other.kind and (can.divided, can.tensor, can.flat) == (
        its.divided,
        its.tensor,
        its.flat,
    )


def _differing(role: BoundRole, other: BoundRole) -> str | None:
    """Return how the weights in two model folders differ, or None if they have the same names and shapes.

    Folders without safetensors files are compared when the models are loaded.
    """
    if role.folder is None or other.folder is None or role.folder == other.folder:
        return None
    own, its = facts(role.folder).shapes, facts(other.folder).shapes
    name = next((name for name in {**own, **its} if own and its and own.get(name) != its.get(name)), None)
    return f"{name}: {own.get(name, 'none')} and {its.get(name, 'none')}" if name else None


def _backend_problem(role: BoundRole) -> Problem:
    return Problem(
        "follow-backend",
        f"the trainer of '{role.name}' cannot follow another model, or be followed",
        found=f"{role.trainer.backend}, which does not show its weights",
        expected="a trainer with the method masters()",
        remedy=f"--{role.name}.trainer local",
    )


def _model_problem(role: BoundRole, other: BoundRole, differing: str) -> Problem:
    return Problem(
        "follow-model",
        f"role '{role.name}' follows '{other.name}', but has another kind of model",
        found=differing,
        expected="models with the same weights",
        remedy=f"start both from the same kind of model: --{role.name}.model {other.folder}",
    )


def _layout_problem(role: BoundRole, other: BoundRole) -> Problem:
    return Problem(
        "follow-layout",
        f"the trainers of '{role.name}' and '{other.name}', which it follows, divide their weights over the "
        "ranks in different ways",
        found=f"{role.trainer.backend} and {other.trainer.backend}",
        expected="the same backend and the same settings, or two pools",
        remedy=f"give '{role.name}' the trainer settings of '{other.name}', or another pool: "
        f"--{role.name}.trainer.pool",
    )
