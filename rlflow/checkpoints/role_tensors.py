"""Convert a trainer's state to a checkpoint's groups of tensors and back."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from rlflow.checkpoints.snapshot import Groups
from rlflow.errors import PlanError

PARAMETERS = "parameters"
OPTIMIZER = "optimizer"


def role_tensors(role: str, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """Split the result of ``Trainer.state()`` into a role's two groups in a checkpoint.

    ``ROLE.parameters`` has the parameters under their Hugging Face names, and ``ROLE.optimizer`` has
    everything else.
    """
    prefix = PARAMETERS + "/"
    own = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    rest = {name: tensor for name, tensor in state.items() if not name.startswith(prefix)}
    return {f"{role}.{PARAMETERS}": own, f"{role}.{OPTIMIZER}": rest}


def trainer_state(tensors: Groups, role: str) -> dict[str, Tensor]:
    """Return a role's tensors from a checkpoint, ready for ``Trainer.restore()``.

    Raises PlanError if the role isn't in the checkpoint.
    """
    parameters, rest = (tensors.get(f"{role}.{kind}") for kind in (PARAMETERS, OPTIMIZER))
    if parameters is None or rest is None:
        raise no_role(role, tensors)
    return {f"{PARAMETERS}/{name}": tensor for name, tensor in parameters.items()} | dict(rest)


def roles_of(tensors: Groups) -> list[str]:
    """Return the names of the roles whose parameters a checkpoint has."""
    return [group.removesuffix("." + PARAMETERS) for group in tensors if group.endswith("." + PARAMETERS)]


def no_role(role: str | None, tensors: Groups) -> PlanError:
    """Return the error for a checkpoint that doesn't have ``role``.

    If ``role`` is None, the error says that the checkpoint has several roles or none.
    """
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
