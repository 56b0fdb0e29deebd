"""Questions to the kernel, asked only on Linux."""

import ctypes
import sys

import pytest

from rlflow.processes.sandbox import kernel


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_other_systems_have_no_landlock(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("asked"))
    assert kernel.landlock_version() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_linux_reports_its_landlock_version():
    answer = int(ctypes.CDLL(None).syscall(kernel.CREATE_RULESET, None, 0, 1))
    assert kernel.landlock_version() == max(answer, 0)
