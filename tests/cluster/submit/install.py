"""Virtual environments within the one of the tests, for programs that read or run the output of `rlflow job`.

``python tests/cluster/submit/install.py`` installs SkyPilot, which pins older versions of shared packages,
and Ray's job server, which would make every Ray of the other tests start more processes.
"""

import site
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

SKYPILOT = Path(sys.prefix) / "skypilot" / "bin" / "python"
# also sees all packages of the outer environment
JOB_SERVER = Path(sys.prefix) / "jobserver" / "bin" / "python"


def made(python: Path, *packages: str, outer: bool = False) -> None:
    """Make the environment and install packages into it."""
    venv.create(python.parents[1], with_pip=True)
    if outer:
        inside = subprocess.run(
            [python, "-c", "import site; print(site.getsitepackages()[0])"],
            capture_output=True,
            text=True,
            check=True,
        )
        lines = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
        (Path(inside.stdout.strip()) / "outer.pth").write_text("".join(lines))
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)


if __name__ == "__main__":
    made(SKYPILOT, "skypilot==0.14.1")
    made(JOB_SERVER, f"ray[default]=={version('ray')}", outer=True)
