"""The command that installs a backend's package fits this machine."""

import sys
from importlib import import_module
from pathlib import Path

import pytest

from rlflow.extras import INSTALL, ON_CPU, install_line, late


@pytest.mark.parametrize(
    ("device", "driver", "line"),
    [
        ("cpu", True, ON_CPU["vllm"]),
        ("auto", False, ON_CPU["vllm"]),
        ("auto", True, INSTALL["vllm"]),
        ("cuda", False, INSTALL["vllm"]),
    ],
)
def test_a_machine_with_a_gpu_has_its_own_command(monkeypatch, device, driver, line):
    monkeypatch.setattr(Path, "exists", lambda path: driver)
    assert install_line("vllm", device) == line
    assert install_line("deepspeed", device) == INSTALL["deepspeed"]


def test_a_lazy_package_runs_at_its_first_use(tmp_path, monkeypatch):
    for name in ("seldom_used", "always_used"):
        (tmp_path / f"{name}.py").write_text(f"import sys\nsys.has_run.append('{name}')\nvalue = 7\n")
    (tmp_path / "user_of_both.py").write_text(
        "import seldom_used as one, always_used as other\nimport seldom_used\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "has_run", (run := []), raising=False)
    finders = list(sys.meta_path)
    with late(["seldom_used"]):
        user = import_module("user_of_both")
    assert (run, sys.meta_path) == (["always_used"], finders)
    assert (user.one.value, run) == (7, ["always_used", "seldom_used"])
    with pytest.raises(AttributeError, match="module 'seldom_used' has no attribute 'other_value'"):
        print(user.one.other_value)
    assert run == ["always_used", "seldom_used"]
