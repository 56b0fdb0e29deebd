"""What is asked of the kernel, and only where it is Linux."""

import ctypes
import sys

import pytest

from rlflow.processes.sandbox import kernel


@pytest.mark.parametrize("platform", ["darwin", "win32"])
def test_elsewhere_there_is_no_landlock_and_no_kernel_is_asked(monkeypatch, platform):
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: pytest.fail("asked"))
    assert kernel.landlock_version() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has it")
def test_on_linux_the_kernel_says_which_version_it_has():
    answer = int(ctypes.CDLL(None).syscall(kernel.CREATE_RULESET, None, 0, 1))
    assert kernel.landlock_version() == max(answer, 0)
