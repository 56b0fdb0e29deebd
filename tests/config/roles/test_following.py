"""Trainers that can't follow each other are refused before any model is loaded."""

import shutil
from dataclasses import replace

import pytest
from safetensors.torch import load_file, save_file
from sources import TASKS

from rlflow.author.load import load_flow
from rlflow.backends.null import Trainer
from rlflow.compiler.placement import Placement
from rlflow.compiler.trace.compile import compile_flow
from rlflow.config.flags import sort_values
from rlflow.config.footprint import footprint
from rlflow.config.roles.bound import bind_roles
from rlflow.config.roles.following import follow_problems

MODEL = TASKS / "arithmetic_model"


class Hidden(Trainer):
    """A trainer that doesn't show its weights."""

    masters = None


def bound(**values):
    graph = compile_flow(load_flow("tr_dpo")).graph
    return bind_roles(graph, sort_values({"model": str(MODEL), **values}, [use.name for use in graph.roles]))


def pools(actor, reference):
    return Placement({"one": 2, "two": 2}, {"actor": actor, "reference": reference}, {})


def codes(roles, placement=None):
    return [problem.code for problem in follow_problems(roles, placement)]


def test_equal_trainers_may_follow_each_other():
    for backend in ("local", "fsdp", "deepspeed"):
        assert codes(bound(trainer=backend), pools("one", "one")) == []


def test_a_trainer_that_does_not_show_its_weights_is_refused():
    roles = bound()
    hidden = replace(roles["reference"].trainer, kind=Hidden)
    assert codes(roles | {"reference": replace(roles["reference"], trainer=hidden)}) == ["follow-backend"]


def test_a_model_with_other_weights_is_refused(tmp_path):
    other = shutil.copytree(MODEL, tmp_path / "other")
    (file,) = other.glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors, key=lambda name: tensors[name].numel())
    save_file(tensors | {name: tensors[name][:-1].clone()}, file, {"format": "pt"})
    assert codes(bound(**{"reference.model": str(other)})) == ["follow-model"]


def test_weights_that_are_divided_in_another_way_are_refused_on_one_pool():
    roles = bound(**{"actor.trainer": "fsdp"})
    (problem,) = follow_problems(roles, pools("one", "one"))
    assert problem.code == "follow-layout"
    assert codes(roles, pools("one", "two")) == []
    assert (
        codes(bound(**{"reference.trainer": "fsdp"}), pools("one", "one")) == []
    )  # all of the actor is there


@pytest.mark.parametrize(("pool", "kinds"), [("one", ["weights"]), ("two", ["weights", "arriving weights"])])
def test_the_plan_counts_weights_that_follow_as_float32(pool, kinds):
    role = bound()["reference"]
    sizes = footprint(role, "bfloat16", pools("one", pool)).trainer()
    assert list(sizes) == kinds
    assert set(sizes.values()) == {footprint(role, "float32", pools("one", pool)).trainer()["weights"]}
