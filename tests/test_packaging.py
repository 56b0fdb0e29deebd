"""The built packages contain everything that an installed rlflow needs: algorithms, backends, the packaged
task."""

import subprocess
import sys
import tarfile
import zipfile

import pytest
from sources import ROOT

NEEDED = [
    "rlflow/__init__.py",
    "rlflow/py.typed",
    "rlflow/algorithms/ppo.py",
    "rlflow/backends/null.py",
    "rlflow/backends/local/trainer.py",
    "rlflow/data/tasks/ppo.toml",
    "rlflow/recipes/code.toml",
    "rlflow/recipes/code.py",
    "rlflow/data/tasks/arithmetic_model/model.safetensors",
    "rlflow/data/tasks/arithmetic_lessons.jsonl",
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel, built from the source distribution as by an installer."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)],
        check=True,
        capture_output=True,
    )
    return min(out.glob("*.whl")), min(out.glob("*.tar.gz"))


@pytest.mark.slow
def test_every_package_folder_is_listed_and_built(built):
    names = set(zipfile.ZipFile(built[0]).namelist())
    assert not [name for name in NEEDED if name not in names]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "rlflow").rglob("*.py")}
    assert not sources - names, "a package is missing in pyproject.toml"


@pytest.mark.slow
def test_the_source_distribution_holds_the_mapped_folders(built):
    with tarfile.open(built[1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"algorithms/ppo.py", "backends/null.py", "LICENSE"} <= names


@pytest.mark.slow
def test_an_installed_wheel_checks_and_runs_an_algorithm(built, tmp_path):
    site, runs = str(tmp_path / "site"), str(tmp_path / "runs")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", site, str(built[0])],
        check=True,
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import rlflow; print(rlflow.__file__)\nrun = "
        "rlflow.run('ppo', backend='null', iterations=2, prompts=4, out=sys.argv[2], **{'hp.max_tokens': "
        "4})\nprint(run.iterations)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", code, site, runs], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str(tmp_path / "site" / "rlflow" / "__init__.py"), "2"]
