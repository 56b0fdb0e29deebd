"""What `rlflow doctor` says of a package and of PyTorch."""

import subprocess
from importlib import metadata

import pytest

from rlflow.cli.watch import print_doctor
from rlflow.watch import doctor
from rlflow.watch.doctor import Package, asked_torch, package_line, required


@pytest.fixture
def ray(monkeypatch):
    """The package ray, in the release that the function is called with."""
    def installed(release):
        monkeypatch.setattr(doctor, "version", lambda name: release if name in ("ray", "rlflow-dag") else None)
        monkeypatch.setattr(doctor, "remarks", lambda name, release, torch: "")
        return package_line(Package(("ray",), "pools", "'rlflow-dag[cluster]'"), {})

    monkeypatch.setattr(metadata, "requires", lambda name: ["Torch_x<3,>=2.7", 'ray>=2.40; extra == "cluster"', "typer"])
    return installed


@pytest.mark.parametrize(
    ("release", "line"),
    [
        (None, "ray: not installed; pools: pip install 'rlflow-dag[cluster]'"),
        ("2.39.1", "ray 2.39.1: too old, 2.40 is wanted: pip install --upgrade 'rlflow-dag[cluster]'"),
        ("2.40", "ray 2.40: pools"), ("2.60.0", "ray 2.60.0: pools"),
    ],
)
def test_a_package_can_be_used_is_too_old_or_missing(ray, release, line):
    assert ray(release) == line


def test_the_lowest_version_is_that_of_rlflows_own_metadata(ray):
    ray("2.40")
    assert (required("torch-x"), required("ray"), required("typer"), required("other")) == ("2.7", "2.40", None, None)


@pytest.mark.parametrize(("stderr", "problem"), [("Traceback\nImportError: libcudart", "ImportError: libcudart"), ("", "it died")])
def test_a_torch_that_does_not_answer_is_told_with_its_last_words(monkeypatch, stderr, problem):
    monkeypatch.setattr(doctor, "version", lambda name: "2.13")
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: subprocess.CompletedProcess(command, 1, "", stderr))
    assert asked_torch()["problem"] == problem


def test_doctor_is_no_judge(monkeypatch, capsys):
    monkeypatch.setattr("rlflow.cli.watch.sections", lambda: [("packages", ["torch 2.13"])])
    assert print_doctor() == 0
    assert "torch 2.13" in capsys.readouterr().out


def test_gpus_are_listed_with_their_memory():
    assert doctor.gpus({"gpus": [("NVIDIA H100", 80 * 2**30), ("NVIDIA A10", 24 * 2**30)]}) == "NVIDIA H100, 80 GiB; NVIDIA A10, 24 GiB"
    assert doctor.gpus({}).endswith("(--device cpu)") or "driver" in doctor.gpus({})


def test_of_the_client_of_mlflow_alone_doctor_says_what_its_pages_need(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda name: None)
    assert doctor.remarks("mlflow-skinny", "3.0", {}) == "the client; its pages need pip install mlflow"
    monkeypatch.setattr(doctor, "version", lambda name: "3.0")
    assert doctor.remarks("mlflow-skinny", "3.0", {}) == ""
