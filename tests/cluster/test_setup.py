"""The transfer of a flow to a worker: the worker runs the driver's text, whatever files its disk has."""

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


def test_the_flow_is_loaded_from_the_text_if_the_file_exists(source):
    assert source.load().parameters.hp.rate == 0.25
    assert source.load().place.path == source.path


@pytest.mark.parametrize("change", ["edited", "gone"])
def test_nothing_is_written_if_the_file_differs_or_is_gone(source, tmp_path, monkeypatch, change):
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
    """Comments are help texts. They come from the source, which has no file here."""
    from rlflow.author.settings import fields

    Path(source.path).unlink()
    assert fields(type(source.load().parameters.hp))["rate"].comment == "of something"


def setup_of(hp=None):
    """Return the setup of a worker in a GRPO run with these settings."""
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


def test_a_worker_traces_the_same_graph_as_the_driver():
    assert setup_of().program().hp.beta == load_flow("grpo").parameters.hp.beta
    program = setup_of({"beta": 0.25}).program()
    assert program.hp.beta == 0.25
    assert identity(program.graph) == setup_of({"beta": 0.25}).graph != setup_of().graph


def test_a_worker_with_another_version_or_graph_refuses_to_start():
    with pytest.raises(PlanError) as refused:
        replace(setup_of(), version="0.0.1").program()
    [problem] = refused.value.problems
    assert (problem.code, problem.found, problem.expected) == ("worker-version", rlflow.__version__, "0.0.1")
    with pytest.raises(PlanError) as refused:
        replace(setup_of({"beta": 0.25}), graph=setup_of().graph).program()
    [problem] = refused.value.problems
    assert (problem.code, problem.found, problem.expected) == (
        "worker-graph",
        setup_of({"beta": 0.25}).graph,
        setup_of().graph,
    )


def test_a_flow_without_a_file_is_sent_as_a_pickle():
    @rlflow.flow
    def here(prompts, actor):
        return actor.generate(prompts, samples=1, max_tokens=2)

    source = FlowSource.of(here)
    assert source.text == ""
    assert source.load().name == "here"


def test_a_pickled_flow_keeps_its_settings():
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
