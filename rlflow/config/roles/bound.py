"""Bind roles to backends: find each role's model folder, classes, settings and capabilities.

The classes are the Trainer and Generator of the role's backends. A run, a plan or a worker binds each role
once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.author.node_options import GenerateOptions
from rlflow.author.settings import fields, override
from rlflow.compiler.graph.model import SIDES, Graph, Op, RoleUse, used_nodes
from rlflow.config.backend_names import setting_problems, untouched
from rlflow.config.flags import RoleConfig, RunConfig
from rlflow.config.folders import model_folder
from rlflow.config.meant import Known
from rlflow.config.options import Options
from rlflow.config.roles.backends import backend, device_in
from rlflow.config.template_kwargs import template_kwargs
from rlflow.errors import PlanError, Problem
from rlflow.extras import missing
from rlflow.training import pretrained
from rlflow.training.protocols import Capabilities, Declares, ScoresTokens


class Sides(NamedTuple):
    """Whether a role needs a trainer, and whether it needs a generator."""

    trainer: bool
    generator: bool


@dataclass(frozen=True)
class BoundSide:
    """One side of a role, its trainer or its generator, with backend, class and settings."""

    half: str  # trainer or generator
    backend: str
    kind: Any  # the backend's class for this side; None if it has none
    settings: Any  # settings of that class; None without a class
    can: Capabilities

    def offers(self, ability: type) -> bool:
        """Whether the class implements one of the optional protocols in ``rlflow/training/protocols.py``."""
        return self.kind is not None and issubclass(self.kind, ability)


@dataclass(frozen=True)
class BoundRole:
    """A model role with its folder, backends and settings."""

    use: RoleUse  # how the flow uses it
    config: RoleConfig  # its settings, unparsed
    folder: Path | None  # folder of the model; None if its backends need no model
    needs: Sides
    variables: Mapping[str, Any]  # variables of the model's chat template, besides messages
    trainer: BoundSide
    generator: BoundSide

    @property
    def name(self) -> str:
        """The role's name in the flow."""
        return self.use.name

    @property
    def sides(self) -> tuple[BoundSide, BoundSide]:
        """The trainer, then the generator."""
        return self.trainer, self.generator

    def half(self, name: str) -> BoundSide:
        """Return the side named "trainer" or "generator"."""
        return self.trainer if name == "trainer" else self.generator


Roles = Mapping[str, BoundRole]


def model_uses(graph: Graph) -> list[RoleUse]:
    """Return the roles that the flow uses and that need a model.

    Rewards need none, unless they are trained or follow a trained role.
    """
    used = {node.role for node in used_nodes(graph)}
    return [use for use in graph.roles if use.name in used and use.own_model]


def needed_sides(graph: Graph, use: RoleUse) -> Sides:
    """Return which sides of a role a flow needs.

    Forward passes and updates need a trainer, sampling needs a generator.
    """
    ops = {node.op for node in used_nodes(graph) if node.role == use.name}
    return Sides(bool(ops - {Op.GENERATE}), Op.GENERATE in ops)


def bind_roles(graph: Graph, config: RunConfig) -> dict[str, BoundRole]:
    """Bind the model roles of a graph, and return them by name.

    This loads no data or models. Raises a single PlanError that lists all invalid names, values, folders and
    packages.
    """
    roles = bind({use: needed_sides(graph, use) for use in model_uses(graph)}, config)
    PlanError.refuse(temperature_problems(graph, roles))
    return roles


def temperature_problems(graph: Graph, roles: Roles) -> Iterator[Problem]:
    """Yield a problem for each sampling temperature that the role's generator doesn't support.

    A temperature computed by a stage is only checked by the generator during sampling.
    """
    for node in used_nodes(graph):
        temperature = node.settings.temperature if isinstance(node.settings, GenerateOptions) else None
        role = roles.get(node.role or "")
        if role is None or not temperature:
            continue
        lowest, highest = role.generator.can.temperatures
        if not lowest <= temperature <= highest:
            engine, usual = role.generator.backend, min(max(lowest, 1.0), highest)
            yield Problem(
                "temperature",
                f"'{node.name}' samples at a temperature that {engine} does not support",
                node.place,
                found=f"temperature {temperature:g}",
                expected=f"0, or from {lowest:g} to {highest:g}",
                remedy=f"--{node.role}.generate.temperature {usual:g}, or another --{node.role}.generator",
            )


def bind(uses: Mapping[RoleUse, Sides], config: RunConfig) -> dict[str, BoundRole]:
    """Bind roles when it is already known which sides they need. Raises PlanError like ``bind_roles``."""
    roles: dict[str, BoundRole] = {}
    problems: list[Problem] = []
    sampling = [use.name for use in uses if use.generates]
    known, variables = (
        Known(config.own, tuple(use.name for use in uses), lambda: sampling),
        template_kwargs(config.data),
    )
    for use, needs in uses.items():
        role, wrong = _bind(use, needs, config.role(use.name), config.options, known, variables)
        problems += wrong
        if role is not None:
            roles[use.name] = role
    PlanError.refuse(dict.fromkeys(problems))
    return roles


def _bind(
    use: RoleUse,
    needs: Sides,
    config: RoleConfig,
    options: Options,
    known: Known,
    variables: Mapping[str, Any],
) -> tuple[BoundRole | None, list[Problem]]:
    kinds = {half: side_class(name, half) for half, name in config.backends.items()}
    folder = model_of(config, options.model)
    if folder is not None and set(config.backends.values()) != {"null"}:
        pretrained.check(folder)
    absent = [
        no_side(config.backends[half], half, use.name)
        for half, need in zip(SIDES, needs, strict=True)
        if need and not kinds[half]
    ]
    # If a backend does not have the side, its settings are unknown too, and reporting them would add nothing.
    problems = absent or setting_problems(config, untouched(config.backends) | class_types(kinds), known)
    problems += [
        problem
        for half, need in zip(SIDES, needs, strict=True)
        if need and kinds[half] is not None and (problem := missing(config.backends[half], options.device))
    ]
    if problems:
        return None, problems
    device = device_in(options.device)
    sides = (_bind_side(half, kinds[half], config, device) for half in SIDES)
    return BoundRole(use, config, folder, needs, variables, *sides), []


def _bind_side(half: str, kind: Any, config: RoleConfig, device: str) -> BoundSide:
    if kind is None:
        return BoundSide(half, config.backends[half], None, None, Capabilities())
    chosen = settings(kind, half, config)
    return BoundSide(half, config.backends[half], kind, chosen, capabilities(kind, chosen, device))


def side_class(name: str, half: str) -> Any:
    """Return a backend's ``Trainer`` or ``Generator`` class, or None if it doesn't have one.

    ``half``: "trainer" or "generator". Raises PlanError if there is no such backend.
    """
    return getattr(backend(name), half.capitalize(), None)


def settings(kind: Any, half: str, config: RoleConfig) -> Any:
    """Return the settings for one side of a role, as an instance of its class's ``Settings``.

    ``trainer.NAME`` and ``generator.NAME`` override ``NAME``. Settings that only the other side has are
    skipped. Raises PlanError for invalid values.
    """
    prefix = f"{half}."
    of_side = {
        name.removeprefix(prefix): value for name, value in config.values.items() if name.startswith(prefix)
    }
    known = fields(kind.Settings)
    return override(
        kind.Settings(),
        {name: value for name, value in {**config.values, **of_side}.items() if name in known},
        f"{config.name}.",
    )


def class_types(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return the type of each setting of a role's two classes, by name. ``kinds``: the class of each side.

    Each setting is listed twice: as ``NAME`` and with its side as a prefix, such as ``trainer.NAME``.
    """
    return {
        name: field.type
        for half, kind in kinds.items()
        if kind is not None
        for field in fields(kind.Settings).values()
        for name in (field.name, f"{half}.{field.name}")
    }


def capabilities(kind: Any, chosen: Any, device: str) -> Capabilities:
    """Return what a backend's class can do with the settings ``chosen``.

    A class without a method ``capabilities`` can only do what its protocol requires. Raises PlanError if the
    method fails or returns something other than Capabilities.
    """
    try:
        can: object = kind.capabilities(chosen, device) if isinstance(kind, Declares) else Capabilities()
    except TypeError as error:  # for example, the method is not a class method
        can = error
    if isinstance(can, Capabilities):
        return can
    raise PlanError.of(
        "backend-capabilities",
        f"{kind.__module__}.{kind.__qualname__} does not declare its capabilities",
        found=f"capabilities(settings, device) returned {can!r}",
        expected="a rlflow.training.protocols.Capabilities",
        remedy="return Capabilities(...) from a class method of this name",
    )


def usual(name: str, half: str) -> Capabilities:
    """Return what a backend's trainer or generator can do on a CPU with default settings."""
    kind = side_class(name, half)
    return Capabilities() if kind is None else capabilities(kind, kind.Settings(), "cpu")


def no_side(name: str, half: str, role: str) -> Problem:
    """Return the problem for a backend that lacks the trainer or generator a role needs."""
    return Problem(
        "backend-half",
        f"the backend '{name}' has no {half.capitalize()}, which role '{role}' needs",
        found=f"{half} {name}",
        expected=f"a backend with a {half.capitalize()}, such as local",
        remedy=f"--{role}.{half} local",
    )


def folders(roles: Iterable[BoundRole]) -> Iterator[Path]:
    """Yield the model folders of roles, without duplicates."""
    yield from dict.fromkeys(role.folder for role in roles if role.folder is not None)


def model_of(config: RoleConfig, model: str | None) -> Path | None:
    """Return the absolute path of a role's model folder, which is its own or the one given with ``--model``.

    None if its backends need no model. Raises PlanError if a model is needed but not given, or if the folder
    doesn't contain one.
    """
    text = config.values.get("model") or model
    if text is None:
        if set(config.backends.values()) == {"null"}:
            return None
        raise PlanError.of(
            "no-model",
            f"role '{config.name}' has no model",
            found="neither --model nor --" + config.name + ".model",
            expected="a Hugging Face model folder",
            remedy="--model FOLDER",
        )
    return model_folder(text, f"--model or --{config.name}.model").absolute()


def has_weight_check(role: BoundRole, options: Options) -> bool:
    """Whether weight checks compare a role's trainer with its generator.

    This is done if the sides have different backends but should hold the same weights.
    """
    wanted = role.use.trained and role.use.generates and bool(options.canary) and not options.staleness
    return wanted and role.trainer.backend != role.generator.backend and role.generator.offers(ScoresTokens)


def shares_weights(role: BoundRole, options: Options) -> bool:
    """Whether a role's generator samples from the same tensors that its trainer updates.

    This requires a single process, no staleness, the same dtype on both sides, and no offloading.
    """
    beside = all(role.needs) and not options.pools and not options.staleness and options.memory is None
    same = options.dtype != "bfloat16" or not (role.use.trained or role.use.follows)  # these are float32
    can = role.trainer.can.live and role.generator.can.shares
    return beside and same and can and not (role.use.trained and role.trainer.can.adapters)
