"""Facts about the machine, and the results of the sections as a Markdown table and a JSON file."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpu.check import Check, Verdict

PACKAGES = ("torch", "transformers", "numpy", "safetensors", "peft", "ray", "deepspeed", "vllm", "trl")


@dataclass
class Row:
    """The results of one section."""

    name: str
    group: str
    what: str
    seconds: float = 0.0
    checks: list[Check] = field(default_factory=list)
    log: str = ""  # the end of the section's output, if the section failed

    @property
    def verdict(self) -> Verdict:
        """`failed` if a check failed, `ok` if at least one check is ok, otherwise `untested`."""
        found = {check.verdict for check in self.checks}
        return "failed" if "failed" in found else "ok" if "ok" in found else "untested"

    def count(self, verdict: Verdict) -> int:
        return sum(check.verdict == verdict for check in self.checks)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "group": self.group,
            "what": self.what,
            "verdict": self.verdict,
            "seconds": round(self.seconds, 2),
            "checks": [asdict(check) for check in self.checks],
            **({"log": self.log} if self.log else {}),
        }


def machine(device: str) -> Iterator[dict[str, Any]]:
    """Yield facts about the machine.

    Run this in a separate process, because it creates a context on the GPU.
    """
    found: dict[str, Any] = {
        "system": platform.platform(),
        "processors": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "device": platform.machine(),
    }
    found["packages"] = {name: known for name in PACKAGES if (known := _version(name))}
    yield found | (_gpu() if device == "cuda" else {})


def _gpu() -> dict[str, Any]:
    import torch

    own = torch.cuda.get_device_properties(0)
    return {
        "device": own.name,
        "devices": torch.cuda.device_count(),
        "memory_bytes": own.total_memory,
        "driver": _driver(),
        "capability": f"{own.major}.{own.minor}",
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _version(name: str) -> str | None:
    with contextlib.suppress(PackageNotFoundError):
        return version(name)
    return None


def _driver() -> str:
    words = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return (
            subprocess.run(words, capture_output=True, text=True, timeout=20, check=True)
            .stdout.splitlines()[0]
            .strip()
        )
    return "unknown"


def table(rows: Sequence[Row]) -> str:
    """Return a Markdown table with a line for each section."""
    heads = ("section", "what", "verdict", "ok", "failed", "untested", "seconds")
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | ---: | ---: | ---: | ---: |"]
    for row in rows:
        counts = [str(row.count(verdict)) for verdict in ("ok", "failed", "untested")]
        lines.append(
            f"| {' | '.join([f'`{row.name}`', row.what, row.verdict, *counts, f'{row.seconds:.0f}'])} |"
        )
    return "\n".join(lines)


def write(path: Path, facts: dict[str, Any], command: Sequence[str], rows: Sequence[Row]) -> None:
    """Write the results to a JSON file."""
    result = {"command": list(command), "machine": facts, "sections": [row.as_json() for row in rows]}
    path.write_text(json.dumps(result, indent=1) + "\n")
