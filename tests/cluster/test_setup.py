"""A flow on its way to a worker: what runs there is the text that the driver has, whatever lies on the
worker's disk."""

import dataclasses
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

import rlflow
from rlflow.author.load import load_flow
from rlflow.author.settings import fields
from rlflow.cluster.setup import FlowSource, Setup
from rlflow.compiler.graph.wire import identity
from rlflow.compiler.placement import Placement
from rlflow.compiler.trace.compile import TraceOptions, compile_flow
from rlflow.data.scorer import DataShape
from rlflow.errors import PlanError

FLOW = """
from dataclasses import dataclass

from rlflow import flow

@dataclass
class Settings:
    rate: float = {rate}  # of something

@flow
def {name}(prompts, actor, hp=Settings()):
    pass
"""


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


def told(hp=None):
    """What a worker is told of a run of GRPO with these settings."""
    flow = load_flow("grpo")
    settings = replace(flow.parameters.hp, **hp) if hp is not None else None
    graph = identity(compile_flow(flow, settings).graph)
    return Setup(
        rlflow.__version__,
        FlowSource.of(flow),
        hp,
        None,
        TraceOptions(),
        graph,
        DataShape({}, None),
        Placement({"all": 1}),
        "all",
        0,
        1,
        {},
        1,
        "meeting",
    )


def test_a_worker_traces_the_graph_that_the_driver_has_with_the_runs_settings():
    assert told().program().hp.beta == load_flow("grpo").parameters.hp.beta
    program = told({"beta": 0.25}).program()
    assert program.hp.beta == 0.25
    assert identity(program.graph) == told({"beta": 0.25}).graph != told().graph


def test_a_worker_with_another_version_or_another_graph_says_both_and_does_not_start():
    with pytest.raises(PlanError) as refused:
        replace(told(), version="0.0.1").program()
    [problem] = refused.value.problems
    assert (problem.code, problem.found, problem.expected) == ("worker-version", rlflow.__version__, "0.0.1")
    with pytest.raises(PlanError) as refused:
        replace(told({"beta": 0.25}), graph=told().graph).program()
    [problem] = refused.value.problems
    assert (problem.code, problem.found, problem.expected) == (
        "worker-graph",
        told({"beta": 0.25}).graph,
        told().graph,
    )


def test_a_flow_of_no_file_goes_along_as_a_pickle_and_needs_no_module_there():
    @rlflow.flow
    def here(prompts, actor):
        return actor.generate(prompts, samples=1, max_tokens=2)

    source = FlowSource.of(here)
    assert source.text == ""
    assert source.load().name == "here"


def test_a_flow_that_goes_along_as_a_pickle_leaves_its_settings_as_they_are():
    @dataclasses.dataclass
    class Settings:
        beta: float
        clips: list[float] = dataclasses.field(default_factory=list)

    defaults = Settings(0.5)

    @rlflow.flow
    def here(prompts, actor, hp=defaults):
        return actor.generate(prompts, samples=1, max_tokens=2)

    FlowSource.of(here).load()
    assert fields(Settings)["beta"].default is dataclasses.MISSING
    assert fields(Settings)["clips"].default == []
