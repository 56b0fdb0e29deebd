"""Processes for tests."""

import subprocess
import sys

import pytest


@pytest.fixture
def python():
    """Start a Python process that runs some code. The fixture kills all remaining processes at the end."""
    started = []

    def start(code, *words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        started.append(subprocess.Popen([sys.executable, "-c", code, *map(str, words)], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
