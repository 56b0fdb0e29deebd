"""Compile and plan every cell before a comparison starts, and compute the key of each cell.

A key is a digest of the cell's settings and files, and of the code, versions and machine that run the cell.
Results are stored under the key. Cells that differ in anything therefore never share results, and newer code
does not use results from older code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from rlflow.author.load import load_flow
from rlflow.benchmarks.suite import RLFLOW, Cell, Settings, Suite
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.trace.compile import TraceOptions
from rlflow.config.backend_names import source_files
from rlflow.config.flags import RunConfig
from rlflow.errors import FlowError, PlanError, listed, nearest
from rlflow.runs.api import resolve_config
from rlflow.runs.depends import module_version
from rlflow.runs.preview import preview
from rlflow.runs.trust import imports

# function that returns those settings of a run that shape its graph, as `rlflow plan` reads them
Shape = Callable[[RunConfig], TraceOptions]
PEERS = Path(__file__).parent / "peers"
PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "ray",
    "vllm",
    "deepspeed",
    "peft",
    "reasoning-gym",
    "math-verify",
)
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True)
class Compiled:
    """A compiled cell, which is ready to run."""

    cell: Cell
    file: Path  # the file that defines the cell's class System
    key: str
    parts: Mapping[str, Any]  # the content from which the key is computed
    # number of iterations by the cell's settings; None if it is unknown before the cell is prepared
    iterations: int | None


def compile_cells(suite: Suite, shape: Shape) -> tuple[Compiled, ...]:
    """Compile and plan every cell, without starting any.

    Raises one PlanError that lists the problems with all cells. Each message names its cell.
    """
    compiled, problems = [], []
    for cell in suite.cells:
        try:
            compiled.append(compile_cell(cell, shape, suite.settings))
        except (FlowError, PlanError) as error:
            problems += [replace(one, message=f"cell '{cell.name}': {one.message}") for one in error.problems]
    if problems:
        raise PlanError(*problems)
    keys = [each.key for each in compiled]
    for one in compiled:
        if keys.count(one.key) > 1:
            same = [each.cell.name for each in compiled if each.key == one.key]
            raise PlanError.of(
                "suite",
                "several cells have the same settings",
                found=listed(same),
                expected="cells that differ in a setting",
                remedy="remove all but one of them",
            )
    return tuple(compiled)


def compile_cell(cell: Cell, shape: Shape, settings: Settings | None = None) -> Compiled:
    """Compile a cell and compute its key.

    ``settings``: the suite's settings. The key includes those that determine which iterations of a turn are
    timed. Raises FlowError and PlanError.
    """
    file, turns = system_file(cell.system), settings or Settings()
    parts: dict[str, Any] = {
        "system": cell.system,
        "flags": texts(cell.flags),
        "code": code_digest(),
        "file": digest_of(file),
        "versions": versions(),
        "machine": machine(),
        "threads": threads(),
        "turns": {"block": turns.block, "settle": turns.settle, "warms up": turns.rounds is not None},
    }
    iterations = None
    if cell.system == RLFLOW:
        own, iterations = plan_of(cell, shape)
        parts |= own
    else:
        parts |= files_of({**cell.flags, "system": file})
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode())
    return Compiled(cell, file, digest.hexdigest()[:16], parts, iterations)


def system_file(system: str) -> Path:
    """Return the file that defines a system. Raises PlanError for an unknown system."""
    shipped = {file.stem: file for file in sorted(PEERS.glob("[!_]*.py"))}
    if system == RLFLOW:
        return Path(__file__).parent / "rlflow_system.py"
    if system in shipped:
        return shipped[system]
    if (path := Path(system).expanduser()).is_file():
        return path.absolute()
    raise PlanError.of(
        "suite",
        f"there is no system '{system}'",
        found=system,
        expected=f"one of {listed([RLFLOW, *shipped])}, or FILE.py",
        nearest=nearest(system, [RLFLOW, *shipped]),
        remedy="docs/bench.md explains how to write one",
    )


def plan_of(cell: Cell, shape: Shape) -> tuple[dict[str, Any], int]:
    """Return (parts of the key for a run of rlflow, the run's number of iterations).

    Raises FlowError and PlanError for the same mistakes as a run.
    """
    flow = load_flow(cell.algorithm)
    config, hp = resolve_config(flow, None, dict(cell.flags))
    explanation = preview(flow, hp, config, shape(config))
    parts = {
        "graph": identity(explanation.graph),
        "flow": flow.name,
        "hp": texts(vars(hp) if hp is not None else {}),
        "values": texts(config.values),
        **files_of({**config.values, "algorithm": Path(flow.place.path)}),
    }
    return parts, config.options.iterations


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return settings as strings, sorted by name."""
    return {name: repr(value) for name, value in sorted(values.items())}


def files_of(values: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return digests of the files and folders named in settings, and versions of the modules that these files
    import.

    A Python file's imports from its own folder are digested too. Other imports are recorded with their
    versions.
    """
    files, modules = {}, set[str]()
    for name, path in named_paths(values):
        files[name] = digest_of(path)
        if path.suffix == ".py":
            closure = imports(path.resolve())
            modules |= closure.outside
            files |= {
                f"{name}: {os.path.relpath(each, path.resolve().parent)}": digest_of(each)
                for each in sorted(closure.files)
            }
    for backend in backends_of(values):
        files |= {f"{backend}: {each.name}": digest_of(each) for each in source_files(backend)}
    known = {module: version for module in sorted(modules) if (version := module_version(module))}
    return {"files": files, "modules": known}


def backends_of(values: Mapping[str, Any]) -> list[str]:
    """Return the users' own backends in settings: those named by a dotted module outside rlflow."""
    sides = ("backend", "trainer", "generator")
    return sorted(
        {
            str(value)
            for name, value in values.items()
            if name.rpartition(".")[2] in sides and "." in str(value)
        }
    )


def named_paths(values: Mapping[str, Any]) -> Iterable[tuple[str, Path]]:
    """Yield (setting, path) for each file or folder that a setting names.

    A setting may also name it as NAME=FILE, FILE:0.7 or FILE.py:function.
    """
    for name, value in sorted(values.items()):
        for number, each in enumerate(value if isinstance(value, list | tuple) else [value]):
            if isinstance(each, str | Path) and (path := _named_path(str(each))) is not None:
                yield f"{name} {number}", path


def _named_path(text: str) -> Path | None:
    """Return the existing file or folder that a string names; None if there is none."""
    for start in (text, text.partition("=")[2]):
        for named in (start, start.rpartition(":")[0]):
            if named and os.path.exists(path := os.path.expanduser(named)):
                return Path(path)
    return None


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, or of the names and contents of all files in a folder."""
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file() and "__pycache__" not in file.parts:
            digest.update(f"{file.relative_to(path)}\0".encode() if path.is_dir() else b"")
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


@cache
def code_digest() -> str:
    """Return a digest of rlflow's source code, including its algorithms, backends and benchmarks."""
    packages = ("rlflow", "rlflow.algorithms", "rlflow.backends", "rlflow.benchmarks")
    folders = [Path(folder) for name in packages for folder in import_module(name).__path__]
    files = sorted(
        {file for folder in folders for file in folder.rglob("*.py") if "__pycache__" not in file.parts}
    )
    return hashlib.sha256(b"".join(hashlib.sha256(file.read_bytes()).digest() for file in files)).hexdigest()


@cache
def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that affect results."""
    known = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known


@cache
def machine() -> dict[str, str]:
    """Return a description of this kind of machine, which is the same for all machines of the kind."""
    return {
        "processor": processor(),
        "cores": str(os.cpu_count()),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.machine()}",
        "accelerators": accelerators(),
    }


def processor() -> str:
    """Return the model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def accelerators() -> str:
    """Return the names of the GPUs."""
    import torch

    return listed(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))


def threads() -> dict[str, str]:
    """Return the settings that determine the number of compute threads."""
    import torch

    return {
        "torch": str(torch.get_num_threads()),
        **{name: os.environ[name] for name in THREADS if name in os.environ},
    }
