"""Processes that tests start."""

import subprocess
import sys

import pytest


@pytest.fixture
def python():
    """Start a Python process that runs some code; what is left of all in the end is killed."""
    started = []

    def start(code, *words, **options):
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **options}
        started.append(subprocess.Popen([sys.executable, "-c", code, *map(str, words)], **options))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
