"""Install the newest releases of all packages that rlflow can use, for ``make test-newest``.

This ignores the upper bounds in pyproject.toml. It leaves out vLLM, since each of its builds only works with
the release of PyTorch that it was compiled with.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = ("rlflow-dag", "vllm")
AFTER_TORCH = "deepspeed"  # its setup.py imports PyTorch


def newest() -> list[str]:
    """Return the requirements in pyproject.toml without their upper bounds."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *sum(project["optional-dependencies"].values(), [])]
    return sorted({re.sub(r",\s*<.*", "", line) for line in lines if not line.startswith(LEFT_OUT)})


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments], check=True)


if __name__ == "__main__":
    pip("--upgrade", *(line for line in newest() if not line.startswith(AFTER_TORCH)))
    pip("--upgrade", "--no-build-isolation", *(line for line in newest() if line.startswith(AFTER_TORCH)))
    pip("--no-deps", "--editable", str(ROOT))
