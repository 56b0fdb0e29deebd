"""A small task of real data and the packaged model, so that a run takes seconds."""

import shutil
from functools import cache
from pathlib import Path

import pytest
from run_faults import run, small


@pytest.fixture
def task(tmp_path):
    """Keywords of a small run on sums from a file."""
    return small(tmp_path)


def saving(keywords):
    """Of a run that is saved after each of its five iterations."""
    return {**keywords, "iterations": 5, "held_out": 0, "save_every": 1}


@pytest.fixture
def sums(tmp_path):
    """Keywords of a run on 24 questions: three iterations of 8 prompts are an epoch."""
    return saving(small(tmp_path, 24))


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """``straight(name, **changes)``: the folder of a run that nothing happens to, with keywords as ``sums``
    has them. Each is made once, and tests copy what they change (``copied``)."""
    return cache(
        lambda name, **changes: (
            run(name, saving(small(tmp_path_factory.mktemp("straight"), 24)), "straight", **changes).folder
        )
    )


@pytest.fixture
def copied(tmp_path):
    """A run's folder, copied, so that a test may go on with it."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "runs" / folder.name, symlinks=True))
