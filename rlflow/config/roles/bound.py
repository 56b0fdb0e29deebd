"""Roles bound to backends: the model folder of each, the classes of its halves, their settings and what they
can do. All of it is resolved here, once for a run, a plan or a worker."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rlflow.author.node_options import GenerateOptions
from rlflow.author.settings import fields, override
from rlflow.compiler.graph.model import HALVES, Graph, Op, RoleUse
from rlflow.compiler.trace.compile import used_nodes
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


class Halves(NamedTuple):
    """Whether a role needs a trainer, and whether it needs a generator."""

    trainer: bool
    generator: bool


@dataclass(frozen=True)
class BoundHalf:
    """A role's trainer or generator."""

    half: str  # trainer or generator
    backend: str
    kind: Any  # its class; None where the backend has none
    settings: Any  # of that class; None where there is none
    can: Capabilities

    def offers(self, ability: type) -> bool:
        """Whether its class has the methods of an optional protocol of ``rlflow/training/protocols.py``."""
        return self.kind is not None and issubclass(self.kind, ability)


@dataclass(frozen=True)
class BoundRole:
    """A role that is a model, resolved."""

    use: RoleUse  # what the flow does with it
    config: RoleConfig  # its settings as they were written
    folder: Path | None  # of the model; None where its backends need none
    needs: Halves
    variables: Mapping[str, Any]  # that the model's chat template gets beside messages
    trainer: BoundHalf
    generator: BoundHalf

    @property
    def name(self) -> str:
        """The role's name in the flow."""
        return self.use.name

    @property
    def halves(self) -> tuple[BoundHalf, BoundHalf]:
        """The trainer, then the generator."""
        return self.trainer, self.generator

    def half(self, name: str) -> BoundHalf:
        """The half of this name, trainer or generator."""
        return self.trainer if name == "trainer" else self.generator


Roles = Mapping[str, BoundRole]


def model_uses(graph: Graph) -> list[RoleUse]:
    """The roles that are models: all that are used, but for rewards that nobody trains."""
    used = {node.role for node in used_nodes(graph)}
    return [use for use in graph.roles if use.name in used and (use.trained or not use.rewards)]


def needed_halves(graph: Graph, use: RoleUse) -> Halves:
    """The halves that a flow uses of a role: a trainer for forwards and updates, a generator for sampling."""
    ops = {node.op for node in used_nodes(graph) if node.role == use.name}
    return Halves(bool(ops - {Op.GENERATE}), Op.GENERATE in ops)


def bind_roles(graph: Graph, config: RunConfig) -> dict[str, BoundRole]:
    """Bind the roles of a graph that are models. Raises PlanError with every name, value, folder and package
    that does not fit, before any data or model is loaded."""
    roles = bind({use: needed_halves(graph, use) for use in model_uses(graph)}, config)
    PlanError.refuse(temperature_problems(graph, roles))
    return roles


def temperature_problems(graph: Graph, roles: Roles) -> Iterator[Problem]:
    """Temperatures at which the generator of a role does not sample. One that a stage computes is judged by
    the generator itself."""
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
                f"'{node.name}' samples at a temperature that {engine} does not know",
                node.place,
                found=f"temperature {temperature:g}",
                expected=f"0, or from {lowest:g} to {highest:g}",
                remedy=f"--{node.role}.generate.temperature {usual:g}, or another --{node.role}.generator",
            )


def bind(uses: Mapping[RoleUse, Halves], config: RunConfig) -> dict[str, BoundRole]:
    """Bind roles of which it is known which halves they need. Raises PlanError, as ``bind_roles`` does."""
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
    needs: Halves,
    config: RoleConfig,
    options: Options,
    known: Known,
    variables: Mapping[str, Any],
) -> tuple[BoundRole | None, list[Problem]]:
    kinds = {half: half_class(name, half) for half, name in config.backends.items()}
    folder = _folder(config, options.model)
    if folder is not None and set(config.backends.values()) != {"null"}:
        pretrained.check(folder)
    absent = [
        no_half(config.backends[half], half, use.name)
        for half, need in zip(HALVES, needs, strict=True)
        if need and not kinds[half]
    ]
    # settings of a half that is not there are unknown, too, which would say no more
    problems = absent or setting_problems(config, untouched(config.backends) | class_types(kinds), known)
    problems += [
        problem
        for half, need in zip(HALVES, needs, strict=True)
        if need and kinds[half] is not None and (problem := missing(config.backends[half], options.device))
    ]
    if problems:
        return None, problems
    device = device_in(options.device)
    halves = (_bind_half(half, kinds[half], config, device) for half in HALVES)
    return BoundRole(use, config, folder, needs, variables, *halves), []


def _bind_half(half: str, kind: Any, config: RoleConfig, device: str) -> BoundHalf:
    if kind is None:
        return BoundHalf(half, config.backends[half], None, None, Capabilities())
    chosen = settings(kind, half, config)
    return BoundHalf(half, config.backends[half], kind, chosen, capabilities(kind, chosen, device))


def half_class(name: str, half: str) -> Any:
    """The Trainer or Generator of a backend, by the name of the half; None where the backend has none. Raises
    PlanError."""
    return getattr(backend(name), half.capitalize(), None)


def settings(kind: Any, half: str, config: RoleConfig) -> Any:
    """The settings of a half: ``trainer.NAME`` and ``generator.NAME`` go before ``NAME``; those of the other
    half are left to it. Raises PlanError for values that do not fit."""
    prefix = f"{half}."
    of_half = {
        name.removeprefix(prefix): value for name, value in config.values.items() if name.startswith(prefix)
    }
    known = fields(kind.Settings)
    return override(
        kind.Settings(),
        {name: value for name, value in {**config.values, **of_half}.items() if name in known},
        f"{config.name}.",
    )


def class_types(kinds: Mapping[str, Any]) -> dict[str, Any]:
    """The types of the settings that the classes of a role's halves have, by name, each also with its half
    before it."""
    return {
        name: field.type
        for half, kind in kinds.items()
        if kind is not None
        for field in fields(kind.Settings).values()
        for name in (field.name, f"{half}.{field.name}")
    }


def capabilities(kind: Any, chosen: Any, device: str) -> Capabilities:
    """What a backend's class can do with these settings. One without ``capabilities`` can do no more than its
    protocol asks. Raises PlanError if it returns something else."""
    try:
        can: object = kind.capabilities(chosen, device) if isinstance(kind, Declares) else Capabilities()
    except TypeError as error:  # such as of a method that is no class method
        can = error
    if isinstance(can, Capabilities):
        return can
    raise PlanError.of(
        "backend-capabilities",
        f"{kind.__module__}.{kind.__qualname__} does not say what it can do",
        found=f"capabilities(settings, device) gave {can!r}",
        expected="a rlflow.training.protocols.Capabilities",
        remedy="return Capabilities(...) from a class method of this name",
    )


def usual(name: str, half: str) -> Capabilities:
    """What a half of a backend can do on a CPU with its default settings."""
    kind = half_class(name, half)
    return Capabilities() if kind is None else capabilities(kind, kind.Settings(), "cpu")


def no_half(name: str, half: str, role: str) -> Problem:
    """The problem that a backend lacks a half that a role needs."""
    return Problem(
        "backend-half",
        f"the backend '{name}' has no {half.capitalize()}, which role '{role}' needs",
        found=f"{half} {name}",
        expected=f"a backend with a {half.capitalize()}, such as local",
        remedy=f"--{role}.{half} local",
    )


def folders(roles: Iterable[BoundRole]) -> Iterator[Path]:
    """The model folders of roles, each once."""
    yield from dict.fromkeys(role.folder for role in roles if role.folder is not None)


def _folder(config: RoleConfig, model: str | None) -> Path | None:
    """The absolute folder that a role's model starts from, its own or that of ``--model``; None where its
    backend needs none. Raises PlanError for one that is missing or holds no model."""
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


def has_canary(role: BoundRole, options: Options) -> bool:
    """Whether the role's trainer and generator, of different backends, are meant to have the same weights."""
    wanted = role.use.trained and role.use.generates and bool(options.canary) and not options.staleness
    return wanted and role.trainer.backend != role.generator.backend and role.generator.offers(ScoresTokens)


def shares_weights(role: BoundRole, options: Options) -> bool:
    """Whether the role's generator samples with the very tensors of its trainer: in one process, where no row
    is sampled with weights that are older, where both compute with the same numbers, and where nothing is
    moved out of memory."""
    beside = all(role.needs) and not options.pools and not options.staleness and options.memory is None
    same = options.dtype != "bfloat16" or not role.use.trained  # what learns, learns in float32
    can = role.trainer.can.live and role.generator.can.shares
    return beside and same and can and not (role.use.trained and role.trainer.can.adapters)
