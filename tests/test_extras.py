"""The line that installs a backend's package is the one for this machine."""

from pathlib import Path

import pytest

from rlflow.extras import INSTALL, ON_CPU, install_line


@pytest.mark.parametrize(
    ("device", "driver", "line"),
    [("cpu", True, ON_CPU["vllm"]), ("auto", False, ON_CPU["vllm"]), ("auto", True, INSTALL["vllm"]), ("cuda", False, INSTALL["vllm"])],
)
def test_a_gpu_has_a_line_of_its_own(monkeypatch, device, driver, line):
    monkeypatch.setattr(Path, "exists", lambda path: driver)
    assert install_line("vllm", device) == line
    assert install_line("deepspeed", device) == INSTALL["deepspeed"]
