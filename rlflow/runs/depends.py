"""Find what a run depends on before its models are loaded, and compare it when the run is resumed.

Dependencies are model folders, rewards, modules, data, packages and the machine.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from rlflow.author.load import algorithms_folder
from rlflow.checkpoints.logs import as_object
from rlflow.checkpoints.model_files import CONFIG, TOKENIZER, index_files, small_files, weight_files
from rlflow.compiler.graph.model import Graph
from rlflow.config.backend_names import SHIPPED, source_files
from rlflow.config.options import Options
from rlflow.config.roles.backends import device_of
from rlflow.config.roles.bound import Roles
from rlflow.config.roles.rewards import RewardNames
from rlflow.data.data_spec import parse_source
from rlflow.data.dataset import Dataset
from rlflow.data.gym import PREFIX
from rlflow.data.hub_names import snapshot_of
from rlflow.errors import PlanError
from rlflow.extras import VERSION
from rlflow.monitoring.reporter import Reporter
from rlflow.rewards.environments.environment_spec import EnvironmentSpec
from rlflow.rewards.reward_spec import RewardSpec
from rlflow.runs import identity
from rlflow.runs.identity import Change, Identity, WeightFile, compare_weights, differences, weight_file
from rlflow.runs.trust import Imports, imports, meaning, root_of

ALWAYS = ("torch", "transformers", "tokenizers", "safetensors", "numpy")
OF_SCORERS = {"math": ("math-verify", "latex2sympy2_extended", "sympy"), "task": ("reasoning-gym",)}
BY_KEY = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "adapter_config.json",
)
NO_MATTER = {"transformers_version", "_name_or_path"}  # keys of a config that only say where it came from
DATA = "data"  # name for a folder that is only read for its tokenizer
LONG = 2000  # characters; a longer group of values is compared as one value
LARGE = 1 << 30  # bytes; a larger file is compared by its size only
SHORT = 200  # characters; a longer value is stored as its digest


@dataclass(frozen=True)
class Sources:
    """The files, models and data that a run uses."""

    file: Path  # of the flow
    roles: Roles  # the roles that are models
    # by a name that doesn't change if files are moved
    rewards: Mapping[str, RewardSpec]
    training: Dataset
    held_out: Dataset
    tokenizer: str | None  # the folder whose tokenizer encodes the data
    sets: Mapping[str, Dataset] = field(default_factory=dict)  # other held-out sets, by name
    environments: tuple[EnvironmentSpec, ...] = ()


def named_rewards(roles: Iterable[str], rewards: RewardNames) -> dict[str, RewardSpec]:
    """Return a run's rewards by name, each only once.

    Names don't change if files are moved. ``roles``: the names of reward roles.
    """
    specs = [
        *rewards.named,
        *(rewards.own[role] for role in roles if role in rewards.own),
        *rewards.judges.values(),
    ]
    named: dict[str, RewardSpec] = {}
    for spec in dict.fromkeys(replace(spec, weight=1.0, source="") for spec in specs):
        name = f"{Path(spec.path).name}:{spec.function}" if spec.kind == "function" else spec.name
        named[name if name not in named else f"{name} ({len(named) + 1})"] = spec
    return named


@dataclass(frozen=True)
class Dependencies:
    """Everything that a run depends on, as currently found on this machine."""

    identity: Identity  # digests of weights may still be missing
    paths: Mapping[str, Path]  # name of a part of the identity → its weights file


def find_dependencies(sources: Sources, options: Options) -> Dependencies:
    """Find everything that a run depends on. Raises PlanError if a model folder can't be read."""
    parts: dict[str, str] = {}
    paths: dict[str, Path] = {}
    weights: dict[str, WeightFile] = {}
    for folder, names in folders(sources).items():
        try:
            parts |= {f"{names}: {name}": value for name, value in _small(folder)}
            parts |= {f"{names}: commit": str(name)} if (name := snapshot_of(folder)) else {}
            own = {f"{names}: {path.name}": path for path in (weight_files(folder) if names != DATA else ())}
            weights |= {name: weight_file(path) for name, path in own.items()}
            paths |= own
        except OSError as error:
            raise unreadable(folder, error) from error
    modules = Imports()
    parts |= dict(_code(sources, modules))
    data = _data_name(sources.training)
    parts |= {f"{_data_name(each)}: commit": each.commit for each in commits(sources.training)}
    parts |= {
        f"{data}: records": f"digest {sources.training.digest}",
        f"{data}: held-out records": f"digest {sources.held_out.digest}",
        **{
            f"chat template: {name}": json.dumps(value)
            for name, value in sources.training.wording.template_kwargs.items()
        },
        **{f"held-out set {name}: records": f"digest {each.digest}" for name, each in sources.sets.items()},
    }
    return Dependencies(
        Identity(kept=parts, told=versions(sources, options, modules), weights=weights), paths
    )


def _data_name(data: Dataset) -> str:
    return f"data {data.name if data.commit else Path(data.name).name}"


def commits(data: Dataset) -> list[Dataset]:
    """Return the data's sources that come from the Hub, with their commits."""
    return [each for each in (data, *data.parts.values()) if each.commit]


def unreadable(folder: Path | None, error: OSError) -> PlanError:
    """Return the error to raise if a model folder can't be read."""
    return PlanError.of(
        "model-folder",
        f"the model folder '{folder}' cannot be read",
        found=str(error.strerror or error),
        expected="a folder whose files can be read",
        remedy="name another folder with --model",
    )


def folders(sources: Sources) -> dict[Path, str]:
    """Return which roles and rewards read each model folder, as text by folder."""
    readers: dict[Path, list[str]] = {}
    for name, role in sources.roles.items():
        if role.folder is not None:
            readers.setdefault(role.folder, []).append(name)
    for name, spec in sources.rewards.items():
        if spec.kind == "model":
            readers.setdefault(Path(spec.path), []).append(f"reward {name}")
    named = sources.tokenizer
    if named is not None and Path(named).absolute() not in readers:
        readers.setdefault(Path(named).absolute(), []).append(DATA)
    return {folder: ", ".join(names) for folder, names in readers.items()}


def _small(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) for each small file of a model folder.

    For certain JSON files, yield each key and its value instead.
    """
    for path in [*small_files(folder, (*CONFIG, *TOKENIZER)), *index_files(folder)]:
        data = path.read_bytes()
        values = as_object(data) if path.name in BY_KEY else None
        if values is None:
            yield path.name, _digest(data)
            continue
        for key in sorted(values.keys() - NO_MATTER):
            yield from _leaves(f"{path.name} {key}", values[key])


def _leaves(name: str, value: object) -> Iterator[tuple[str, str]]:
    """Yield (name, value as text) for a value in a config.

    A small dict is split up into its values, with dotted names.
    """
    text = json.dumps(value, sort_keys=True)
    if isinstance(value, dict) and value and len(text) <= LONG:
        for key in sorted(value):
            yield from _leaves(f"{name}.{key}", value[key])
    else:
        yield name, text if len(text) <= SHORT else _digest(text.encode())


def _digest(data: bytes) -> str:
    return f"sha256 {hashlib.sha256(data).hexdigest()}"


def _code(sources: Sources, modules: Imports) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) for each Python file that the run executes but that isn't part of the graph.

    These are rewards, environments and backends that aren't part of rlflow, and all modules that rewards,
    environments and the flow import from their own folders.
    """
    if not sources.file.is_relative_to(algorithms_folder().resolve()):
        yield from _imported(f"flow {sources.file.name}", sources.file, "", modules)
    for name, spec in sources.rewards.items():
        if spec.kind == "function":
            file = Path(spec.path)
            yield f"reward {name}", f"sha256 {meaning(file)}"
            yield from _imported(f"reward {name}", file, spec.module, modules)
    for environment in sources.environments:
        file = Path(environment.path)
        yield f"environment {environment.name}", f"sha256 {meaning(file)}"
        for name in environment.paths:
            yield f"environment {environment.name}: {name}", _held(Path(environment.settings[name]))
        if not environment.module:  # rlflow's version already covers shipped environments
            yield from _imported(f"environment {environment.name}", file, "", modules)
        elif environment.library:
            modules.outside.add(environment.library)
    for backend in sorted(
        {half.backend for role in sources.roles.values() for half in role.sides} - set(SHIPPED)
    ):
        yield from (
            (f"backend {backend}: {path.name}", f"sha256 {meaning(path)}") for path in _files_of(backend)
        )


def _held(path: Path) -> str:
    """Describe the content of a file that a setting names, by its digest or, if it is large, its size.

    A folder is described as "a folder", because its content isn't compared.
    """
    if not path.is_file():
        return "a folder" if path.is_dir() else "nothing"
    if path.stat().st_size > LARGE:
        return f"{path.stat().st_size} bytes"
    with path.open("rb") as opened:
        return f"sha256 {hashlib.file_digest(opened, 'sha256').hexdigest()}"


def _files_of(backend: str) -> list[Path]:
    """Return a backend's Python files, or [] if its module doesn't come from a file."""
    try:
        return [path for path in source_files(backend) if path.is_file()]
    except ValueError:
        return []


def _imported(name: str, file: Path, module: str, modules: Imports) -> Iterator[tuple[str, str]]:
    closure = imports(file, module)
    modules.outside |= closure.outside
    for path in sorted(closure.files):
        yield f"{name}: {path.relative_to(root_of(file, module)).as_posix()}", f"sha256 {meaning(path)}"


def versions(sources: Sources, options: Options, modules: Imports) -> dict[str, str]:
    """Return the versions of a run's packages, its device and its number of threads, by name."""
    packages = [
        *ALWAYS,
        *(name for spec in sources.rewards.values() for name in OF_SCORERS.get(spec.kind, ())),
    ]
    packages += (
        ["reasoning-gym"] if any(parse_source(data).path.startswith(PREFIX) for data in options.data) else []
    )
    packages += ["ray"] if options.pools and not options.pools.threads else []
    packages += ["peft"] if any(role.config.values.get("lora") for role in sources.roles.values()) else []
    packages += sorted(
        {half.backend for role in sources.roles.values() for half in role.sides} & {"vllm", "deepspeed"}
    )
    known = {name: version for name in dict.fromkeys(packages) if (version := _version(name))}
    known |= {
        name: version
        for name in sorted(modules.outside - {"rlflow"})
        if name not in known and (version := module_version(name))
    }
    threads = options.threads or (os.cpu_count() if options.pools else torch.get_num_threads())
    return {
        "python": platform.python_version(),
        "rlflow": VERSION,
        **known,
        "device": _device(device_of(options.device)),
        "machine": platform.machine(),
        "threads": str(threads),
    }


def _device(kind: str) -> str:
    return (
        torch.cuda.get_device_name(0) if kind == "cuda" else f"cpu, {torch.backends.cpu.get_cpu_capability()}"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def module_version(name: str) -> str | None:
    """Return the version of the package that a module belongs to, or None if unknown."""
    if version := _version(name):
        return version
    packages = _packages().get(name, [])
    return _version(packages[0]) if packages else None


@cache
def _packages() -> Mapping[str, list[str]]:
    """Return the packages that each module belongs to.

    The result is cached, because scanning all installed packages takes a fifth of a second.
    """
    return importlib.metadata.packages_distributions()


def same_inputs(folder: Path, name: str, reporter: Reporter, dependencies: Dependencies) -> Dependencies:
    """Check that a run's dependencies are still the same as when it was started.

    Returns the dependencies with all digests known so far. Raises a PlanError that lists the changes; changed
    package versions are only reported. ``name``: the run's name for the message.
    """
    before = recorded_identity(folder, reporter)
    if before is None:
        return dependencies
    dependencies, changes = compare_inputs(before, dependencies, reporter)
    if changes:
        raise PlanError.of(
            "resume-inputs",
            f"what the run '{name}' depends on has changed",
            found="\n            ".join(map(str, changes)),
            expected="the inputs that the run was started with",
            remedy="restore them, or start a new run from the checkpoint with the changed inputs: rlflow "
            f"resume {name} --fork",
        )
    return dependencies


def other_inputs(folder: Path, reporter: Reporter, graph: Graph, dependencies: Dependencies) -> Dependencies:
    """Report how a fork's dependencies differ from those of the original run in ``folder``.

    Returns the dependencies with all digests known so far.
    """
    before = recorded_identity(folder, reporter)
    if before is None:
        return dependencies
    dependencies, changes = compare_inputs(before, dependencies, reporter)
    for change in changes:
        reporter.note(f"changed since {folder.name} was started: {change}")
    return dependencies


def compare_inputs(
    before: Identity, dependencies: Dependencies, reporter: Reporter
) -> tuple[Dependencies, list[Change]]:
    """Compare dependencies with ``before``. Return them with all digests known so far, and a list of changes.

    Changed package versions are only reported. Raises PlanError if weights can't be read.
    """
    for change in differences(before.told, dependencies.identity.told):
        reporter.note(f"changed since the run was started: {change}; numbers may differ from here on")
    try:
        weights, changes = compare_weights(
            before.weights, dependencies.identity.weights, dependencies.paths, reporter.note
        )
    except OSError as error:
        raise unreadable(Path(str(error.filename)).parent, error) from error
    known = replace(dependencies, identity=dependencies.identity.model_copy(update={"weights": weights}))
    return known, [*differences(before.kept, dependencies.identity.kept), *changes]


def recorded_identity(folder: Path, reporter: Reporter) -> Identity | None:
    """Read the identity that a run recorded in its folder.

    If it is missing or can't be read, this is reported and None is returned.
    """
    try:
        recorded, why = identity.read(folder), f"the run has no {identity.FILE}"
    except ValueError as error:
        recorded, why = None, str(error)
    if recorded is None:
        reporter.note(
            "cannot check whether model folders, rewards and packages are the same as at the start of the "
            f"run: {why}"
        )
    return recorded
