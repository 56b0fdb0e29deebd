"""The lines of `rlflow doctor` about packages and PyTorch."""

import sys

import pytest

from rlflow.monitoring import doctor
from rlflow.monitoring.doctor import Package, package_line, required, torch_facts


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Make this folder the only place where packages are found; return a function that installs the files
    that describe one."""

    def install(name, release, *requirements):
        folder = tmp_path / f"{name.replace('-', '_')}-{release}.dist-info"
        folder.mkdir()
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {release}",
            *(f"Requires-Dist: {each}" for each in requirements),
        ]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")

    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    return install


@pytest.mark.parametrize(
    ("release", "line"),
    [
        (None, "ray: not installed; pools: pip install 'rlflow-dag[cluster]'"),
        ("2.39.1", "ray 2.39.1: too old, needs 2.40: pip install --upgrade 'rlflow-dag[cluster]'"),
        ("2.40", "ray 2.40: pools"),
        ("2.60.0", "ray 2.60.0: pools"),
    ],
)
def test_a_package_can_be_used_is_too_old_or_missing(installed, release, line):
    installed("rlflow-dag", "1.0", 'ray>=2.40; extra == "cluster"')
    if release:
        installed("ray", release)
    assert package_line(Package(("ray",), "pools", "'rlflow-dag[cluster]'"), {}) == line


def test_the_lowest_version_comes_from_rlflows_metadata(installed):
    installed("rlflow-dag", "1.0", "Torch_x<3,>=2.7", 'ray>=2.40; extra == "cluster"', "typer")
    assert (required("torch-x"), required("ray"), required("typer"), required("other")) == (
        "2.7",
        "2.40",
        None,
        None,
    )


@pytest.mark.parametrize(
    ("stderr", "problem"),
    [
        ("Traceback\nImportError: libcudart", "ImportError: libcudart"),
        ("", "its process ended with an error"),
    ],
)
def test_a_crashing_torch_is_reported_with_its_last_output(installed, tmp_path, monkeypatch, stderr, problem):
    installed("torch", "2.13")
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho '{stderr}' >&2\nexit 1\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    assert torch_facts()["problem"] == problem


def test_gpus_are_listed_with_their_memory():
    assert (
        doctor.gpus({"gpus": [("NVIDIA H100", 80 * 2**30), ("NVIDIA A10", 24 * 2**30)]})
        == "NVIDIA H100, 80 GiB; NVIDIA A10, 24 GiB"
    )
    assert doctor.gpus({}).endswith("(--device cpu)") or "driver" in doctor.gpus({})


def test_doctor_names_the_package_that_mlflow_pages_need(installed):
    assert (
        doctor.remarks("mlflow-skinny", "3.0", {}) == "only the client; the web pages need pip install mlflow"
    )
    installed("mlflow", "3.0")
    assert doctor.remarks("mlflow-skinny", "3.0", {}) == ""
