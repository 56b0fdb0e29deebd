"""A flow on its way to a worker: what runs there is the text that the driver has, whatever lies on the worker's disk."""

import os
import tempfile
from pathlib import Path

import pytest

from rlflow.author.load import load_flow
from rlflow.cluster.setup import FlowSource

FLOW = '''
from dataclasses import dataclass

from rlflow import flow

@dataclass
class Settings:
    rate: float = {rate}  # of something

@flow
def {name}(prompts, actor, hp=Settings()):
    pass
'''


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FLOW.format(name="mine", rate=0.25))
    return FlowSource.of(load_flow(str(path)))


def test_the_flow_is_loaded_from_the_text_where_the_file_is_there(source):
    assert source.load().parameters.hp.rate == 0.25
    assert source.load().place.path == source.path


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_nothing_is_written_where_the_file_is_another_one_or_gone(source, tmp_path, monkeypatch, change):
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    if change == "gone":
        Path(source.path).unlink()
    else:
        Path(source.path).write_text("raise SystemExit('this is not the flow')\n")
    flow = source.load()
    assert (flow.name, flow.parameters.hp.rate) == ("mine", 0.25)
    assert not os.path.exists(flow.place.path)
    assert list(shared.iterdir()) == []


def test_comments_of_settings_are_read_from_the_text(source):
    """They are help, and they come from the source, which lies in no file here."""
    from rlflow.author.settings import fields

    Path(source.path).unlink()
    assert fields(type(source.load().parameters.hp))["rate"].comment == "of something"
