"""Convert the state of a role's trainer to groups of tensors in a checkpoint, and back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlflow.checkpoints.snapshot import Groups
from rlflow.errors import PlanError

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"


def role_tensors(role: str, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Split the tensors of ``Trainer.state()`` into the two groups that a checkpoint has for a role.

    The group ``ROLE.parameters`` has the parameters under their Hugging Face names, and ``ROLE.optimizer``
    has all other tensors.
    """
    prefix = PARAMETERS + "/"
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    return {f"{role}.{PARAMETERS}": own, f"{role}.{OPTIMIZER}": rest}


def trainer_state(tensors: Groups, role: str) -> dict[str, Tensor]:
    """Return a role's tensors from a checkpoint, in the form that ``Trainer.restore()`` takes.

    Raises PlanError if the checkpoint does not have the role.
    """
    parameters, rest = (tensors.get(f"{role}.{kind}") for kind in (PARAMETERS, OPTIMIZER))
    if parameters is None or rest is None:
        raise no_role(role, tensors)
    return {f"{PARAMETERS}/{name}": tensor for name, tensor in parameters.items()} | dict(rest)


def roles_of(tensors: Groups) -> list[str]:
    """Return the names of the roles whose parameters are in a checkpoint."""
    return [group.removesuffix("." + PARAMETERS) for group in tensors if group.endswith("." + PARAMETERS)]


def no_role(role: str | None, tensors: Groups) -> PlanError:
    """Return the error for a checkpoint without ``role``; or, if ``role`` is None, without exactly one
    role."""
    roles = roles_of(tensors)
    message = (
        f"the checkpoint has no role '{role}'"
        if role
        else f"the checkpoint has {'several roles' if roles else 'no role'}"
    )
    return PlanError.of(
        "checkpoint-role",
        message,
        found=", ".join(roles) or "none",
        expected="one of its roles",
        remedy=f"name one: --role {next(iter(roles), 'ROLE')}",
    )
