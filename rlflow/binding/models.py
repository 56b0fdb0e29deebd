"""The models of a run, made of bound roles in this process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from rlflow.binding.backends import keep_whole_products
from rlflow.binding.roles import BoundRole, Halves
from rlflow.config.options import Options
from rlflow.execution.engine import Model
from rlflow.training.protocols import ModelSpec

Placed = Callable[[BoundRole], Halves]
Loaded = Callable[[str, str, Any], None]  # what is done with a role's half, trainer or generator, as soon as it is there
Dims = Mapping[str, tuple[tuple[str, int], ...]]  # by role the tensors that are sharded along another dimension than the first, and which


def needed(role: BoundRole) -> Halves:
    """The halves of a role that a run in one process makes: all that it needs."""
    return role.needs


def nothing(role: str, half: str, model: Any) -> None:
    """Do nothing with a model that was loaded."""


def make_models(
    roles: Iterable[BoundRole], options: Options, device: str, updates: Mapping[str, int], placed: Placed = needed,
    loaded: Loaded = nothing, dims: Dims | None = None, outer: Collection[str] = (),
) -> dict[str, Model]:
    """Make a Model for each role, of the halves that ``placed`` names, one after another. ``updates``: optimizer steps of each role over
    the run; ``outer``: roles of whose generator ranks that are not adjacent share a model."""
    keep_whole_products(device, options.dtype)
    models = {}
    for role in roles:
        use = role.use
        spec = ModelSpec(role.folder, use.head, use.trained, device, options.dtype, options.seed, updates.get(use.name, 0),  # type: ignore[arg-type]
                         (dims or {}).get(use.name, ()), use.name in outer)
        model = models[use.name] = Model(forwards_ahead=role.trainer.can.forward_ahead, has_pieces=role.trainer.can.pieces,
                                         has_destinations=role.generator.can.destinations)  # fmt: skip
        for half, wanted in zip(role.halves, placed(role), strict=True):
            if wanted:
                setattr(model, half.half, half.kind(spec, half.settings))
                loaded(use.name, half.half, getattr(model, half.half))
    return models
