"""The neighbouring modules of these tests as fixtures, and disks of a known size."""

import contextlib
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def campaign():
    return importlib.import_module("campaign")


@pytest.fixture(scope="session")
def faults():
    return importlib.import_module("faults")


@pytest.fixture(scope="session")
def powerloss():
    return importlib.import_module("powerloss")


@pytest.fixture(scope="session")
def injected():
    """Run faults.py in a process of its own and return its output."""

    def run(*words):
        command = [sys.executable, str(HERE / "faults.py"), *map(str, words)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


class Disk:
    """A filesystem of 4 MiB in memory."""

    def __init__(self, path):
        self.path = path

    def mount(self, options):
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(self.path)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def fill(self):
        """Fill the disk until no byte is left."""
        with open(self.path / "filler", "ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass

    def empty(self):
        (self.path / "filler").unlink(missing_ok=True)


@pytest.fixture
def disk(tmp_path):
    disk = Disk(tmp_path / "disk")
    disk.path.mkdir()
    made = disk.mount("size=4m")
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk.path)], check=True)
