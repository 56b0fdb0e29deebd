"""Fixtures of small runs: real data and the packaged model, so that a run takes seconds."""

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
    """Add a checkpoint after each of the five iterations."""
    return {**keywords, "iterations": 5, "held_out": 0, "save_every": 1}


@pytest.fixture
def sums(tmp_path):
    """Keywords of a run on 24 questions: three iterations of 8 prompts are an epoch."""
    return saving(small(tmp_path, 24))


@pytest.fixture(scope="session")
def straight(tmp_path_factory):
    """``straight(name, **changes)``: the folder of an undisturbed run with the keywords of ``sums``. Each run
    is made once; tests that change it use ``copied``."""
    return cache(
        lambda name, **changes: (
            run(name, saving(small(tmp_path_factory.mktemp("straight"), 24)), "straight", **changes).folder
        )
    )


@pytest.fixture
def copied(tmp_path):
    """Copy a run's folder, so that a test can resume the copy."""
    return lambda folder: Path(shutil.copytree(folder, tmp_path / "runs" / folder.name, symlinks=True))
