"""`check` warns about draws in stages that the run does not seed, wherever they come from."""

import itertools
import textwrap

import pytest

from rlflow.author.load import load_flow
from rlflow.compiler.check.checker import check
from rlflow.compiler.check.random_draws import unseeded

NUMBERS = itertools.count()
FLOW = """
import random
import numpy
import numpy as np
import torch
import torch.nn.functional as F
from torch import randn
from torch import rand as draw
from rlflow import RANK0, flow, loss, stage

def helper(x):
    return x + torch.randn(x.shape)

@stage(gives="advantages"{dispatch})
def spread(scores, mask{more}):
    return ({expression}) * mask.float()

@loss
def gain(new, advantages):
    return -new.logprobs * advantages * {factor}, {{}}

@flow
def chancy(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= spread(batch)
    actor.update(batch, gain)
"""


def warned(tmp_path, expression, more="", dispatch="", factor="1"):
    path = tmp_path / str(next(NUMBERS)) / "chancy.py"  # a file is loaded once
    path.parent.mkdir()
    path.write_text(FLOW.format(expression=expression, more=more, dispatch=dispatch, factor=factor))
    report = check(load_flow(str(path)), with_variants=False)
    assert report.ok
    lines = path.read_text().splitlines()
    return [
        (problem.found.split(" ")[0], lines[problem.definition.line - 1].strip(), problem.remedy)
        for problem in report.problems
    ]


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("torch.rand(mask.shape)", "torch.rand"),
        ("torch.randn_like(mask.float())", "torch.randn_like"),
        ("torch.randint(0, 2, mask.shape)", "torch.randint"),
        ("torch.bernoulli(torch.ones(mask.shape))", "torch.bernoulli"),
        ("torch.multinomial(torch.ones(mask.shape[1]), 1)", "torch.multinomial"),
        ("torch.randperm(3)[0]", "torch.randperm"),
        ("torch.full(mask.shape, 0.5).bernoulli()", ".bernoulli()"),
        ("F.dropout(mask.float())", "torch.nn.functional.dropout"),
        ("draw(mask.shape)", "torch.rand"),
        ("randn(mask.shape)", "torch.randn"),
        ("torch.empty(mask.shape).uniform_()", ".uniform_()"),
        ("random.random()", "random.random"),
        ("np.random.rand()", "numpy.random.rand"),
        ("numpy.random.normal()", "numpy.random.normal"),
    ],
)
def test_a_draw_from_a_global_rng_is_warned_about_at_its_line(tmp_path, expression, name):
    found, line, _ = warned(tmp_path, expression)[0]
    assert (found, line) == (name, f"return ({expression}) * mask.float()")


def test_a_draw_in_a_called_function_counts_for_the_stage(tmp_path):
    assert [found[:2] for found in warned(tmp_path, "helper(scores[:, None])")] == [
        ("torch.randn", "return x + torch.randn(x.shape)")
    ]


@pytest.mark.parametrize(
    "expression",
    [
        "torch.rand(mask.shape, generator=generator)",
        "torch.bernoulli(torch.ones(mask.shape), generator=generator)",
        "random.Random(7).random()",
        "float(np.random.default_rng(7).random())",
        "scores[:, None].abs()",
    ],
)
def test_seeded_draws_have_no_findings(tmp_path, expression):
    assert warned(tmp_path, expression, ", *, generator", ", dispatch=RANK0") == []


def test_the_remedy_names_the_number_of_generators(tmp_path):
    assert "a tuple with one generator per row" in warned(tmp_path, "torch.rand(mask.shape)")[0][2]
    assert "tuple" not in warned(tmp_path, "torch.rand(mask.shape)", dispatch=", dispatch=RANK0")[0][2]


def test_a_loss_that_draws_is_warned_about(tmp_path):
    found, line, remedy = warned(tmp_path, "scores[:, None]", factor="helper(advantages)")[0]
    assert (found, line) == ("torch.randn", "return x + torch.randn(x.shape)")
    assert (
        remedy
        == "draw in a stage with the parameter `generator` after '*', and read the column that it gives"
    )


def test_mutually_recursive_functions_are_read_once(tmp_path):
    path = tmp_path / "round.py"
    path.write_text(
        textwrap.dedent("""
        import torch
        def one(x):
            return two(x)
        def two(x):
            return one(x) + torch.rand(1)
    """)
    )
    names = {"__name__": "round"}
    exec(compile(path.read_text(), str(path), "exec"), names)
    assert [(name, place.line) for name, place in unseeded(names["one"])] == [("torch.rand", 6)]
