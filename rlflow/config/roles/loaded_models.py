"""Load the models of a run's bound roles in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

from rlflow.author.settings import fields
from rlflow.config.options import Options
from rlflow.config.roles.backends import backend, disable_tf32
from rlflow.config.roles.bound import BoundRole, Sides, shares_weights
from rlflow.data.ends import ends_of
from rlflow.execution.role_model import Model
from rlflow.training.protocols import Head, ModelSpec, SharesWeights, Trainer

Placed = Callable[[BoundRole], Sides]
# called with role, side and model as soon as a trainer or generator is loaded
LoadedModels = Callable[[str, str, Any], None]


def needed(role: BoundRole) -> Sides:
    """Return all sides that a role needs, the default for a run in one process."""
    return role.needs


def nothing(role: str, half: str, model: Any) -> None:
    """Do nothing, the default callback for loaded models."""


def make_models(
    roles: Iterable[BoundRole],
    options: Options,
    device: str,
    updates: Mapping[str, int],
    placed: Placed = needed,
    loaded: LoadedModels = nothing,
    group: Any = None,
) -> dict[str, Model]:
    """Load the models of the roles one after another, and return them by role.

    ``updates``: how many optimizer steps each role takes in the run. ``placed``: a function that returns
    which sides of a role to load in this process. ``loaded``: called with each trainer or generator once it
    is loaded. ``group``: as in ``ModelSpec``.
    """
    disable_tf32(device, options.dtype)
    models = {}
    for role in roles:
        use = role.use
        spec = ModelSpec(
            role.folder,
            cast("Head", use.head),
            use.trained,
            device,
            options.dtype,
            options.seed,
            updates.get(use.name, 0),
            options.longest_row,
            group,
            ends(role),
            use.follows is not None,
        )
        model = models[use.name] = Model()
        for half, wanted in zip(role.sides, placed(role), strict=True):
            if wanted:
                setattr(model, half.half, half.kind(spec, half.settings))
                loaded(use.name, half.half, getattr(model, half.half))
        if (
            model.trainer is not None
            and isinstance(model.generator, SharesWeights)
            and shares_weights(role, options)
        ):
            model.generator.share(model.trainer.weights())
    return models


def ends(role: BoundRole) -> tuple[int, ...]:
    """Return the ids of the tokens that end a role's responses.

    Empty if the role doesn't sample, or if its generator is the null backend.
    """
    samples = role.needs.generator and role.generator.backend != "null"
    return ends_of(role.folder, role.variables).ids if samples and role.folder is not None else ()


def trainer_alone(role: BoundRole, options: Options, updates: int) -> Trainer:
    """Load a role's trainer in this process only, as a reference for results from several ranks.

    This uses the backend `local` on the CPU, with those of the role's settings that `local` has. ``updates``:
    how many optimizer steps the role takes in the run.
    """
    kind, use = backend("local").Trainer, role.use
    settings = {
        name: value for name, value in vars(role.trainer.settings).items() if name in fields(kind.Settings)
    }
    spec = ModelSpec(
        role.folder,
        cast("Head", use.head),
        use.trained,
        "cpu",
        options.dtype,
        options.seed,
        updates,
        longest=options.longest_row,
    )
    return kind(spec, kind.Settings(**settings))  # type: ignore[no-any-return]
