"""`check` calls each loss on synthetic rows and reports failures before the first sampling."""

import itertools

import pytest

from rlflow.author.load import load_flow
from rlflow.compiler.check.checker import check

NUMBERS = itertools.count()
FLOW = """
import torch
from rlflow import flow, group_mean, loss, stage

@stage(gives="advantages", rows="group")
def centred(scores, group, mask):
    return (scores - group_mean(scores, group))[:, None] * mask

@stage(gives="weights")
def ones(mask):
    return mask.float()

{decorator}
def gain({parameters}):
    {body}

@flow
def tried(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    batch |= centred(batch)
    batch |= ones(batch)
    actor.update(batch, gain{settings})
"""


def found(tmp_path, body, parameters="new, advantages", decorator="@loss", settings=""):
    path = tmp_path / str(next(NUMBERS)) / "tried.py"  # a file is loaded once
    path.parent.mkdir()
    path.write_text(FLOW.format(body=body, parameters=parameters, decorator=decorator, settings=settings))
    report = check(load_flow(str(path)), with_variants=False)
    lines = path.read_text().splitlines()
    problems = tuple(
        problem for problem in report.problems if problem.code not in ("never-read", "unseeded-chance")
    )
    for problem in problems:
        assert "actor.update" in lines[problem.place.line - 1]
        assert lines[problem.definition.line - 1].startswith("@loss")
    return problems


def only(problems):
    (problem,) = problems
    return problem


def test_a_model_output_missing_from_the_loss_decorator_is_named(tmp_path):
    problem = only(found(tmp_path, "return -new.logprobs * advantages - 0.01 * new.entropy, {}"))
    assert (problem.code, problem.severity) == ("loss-quantity", "error")
    assert "raised by" in problem.found
    assert "tried.py:15, in gain" in problem.found
    assert problem.remedy == 'write @loss(new=("logprobs", "entropy"))'
    assert not found(
        tmp_path,
        "return -new.logprobs * advantages - 0.01 * new.entropy, {}",
        decorator='@loss(new=("logprobs", "entropy"))',
    )
    assert not found(
        tmp_path,
        "bonus = 0.0 if new.entropy is None else new.entropy\n    return -new.logprobs * advantages - "
        "bonus, {}",
    )


@pytest.mark.parametrize(
    "body",
    ["return -(new.logprobs * advantages).mean(), {}", "return -(new.logprobs * advantages).sum(), {}"],
)
def test_averaged_values_are_refused(tmp_path, body):
    problem = only(found(tmp_path, body))
    assert problem.message.startswith("loss 'gain' returns one number that is already averaged")
    assert "mean=" in problem.remedy


PER_ROW = "return -(new.logprobs * advantages).sum(1), {}"
PER_TOKEN = "return -new.logprobs * advantages, {}"


@pytest.mark.parametrize(
    ("body", "settings", "remedy"),
    [
        (PER_ROW, "", 'write actor.update(…, mean="rows")'),
        (PER_ROW, ', mean="row-tokens"', 'write actor.update(…, mean="rows")'),
        (PER_TOKEN, ', mean="rows"', 'write actor.update(…, mean="tokens" or mean="row-tokens")'),
    ],
)
def test_a_mean_over_the_wrong_level_is_refused_with_a_valid_one(tmp_path, body, settings, remedy):
    assert only(found(tmp_path, body, settings=settings)).remedy == remedy


@pytest.mark.parametrize(
    ("body", "settings"),
    [
        (PER_ROW, ', mean="rows"'),
        (PER_ROW, ", mean=7"),
        (PER_TOKEN, ""),
        (PER_TOKEN, ", mean=7"),
        (PER_TOKEN, ', mean="row-tokens"'),
        ("return -new.logprobs * advantages", ""),
    ],
)
def test_a_sound_loss_has_no_findings(tmp_path, body, settings):
    assert found(tmp_path, body, settings=settings) == ()


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            "return new.logprobs[:, 1:] * advantages[:, 1:], {}",
            "returns a shape that does not match its rows",
        ),
        (
            "return new.logprobs.detach() * advantages, {}",
            "returns values through which no gradient flows to the model",
        ),
        ("return {'loss': new.logprobs}", "does not return a value and metrics"),
        ("return -new.logprobs * advantages, {}, {}", "does not return a value and metrics"),
    ],
)
def test_results_without_a_usable_gradient_are_reported(tmp_path, body, says):
    assert says in only(found(tmp_path, body)).message


@pytest.mark.parametrize(
    ("body", "severity"),
    [
        ("return new.logprobs @ advantages, {}", "error"),
        ("return nothing_such, {}", "error"),
        ("raise ValueError('at most 2 tokens')", "warning"),
    ],
)
def test_an_exception_of_a_loss_names_its_line(tmp_path, body, severity):
    problem = only(found(tmp_path, body))
    assert (problem.code, problem.severity) == ("loss-raised", severity)
    assert "tried.py:15, in gain: " in problem.found


def test_a_loss_that_ignores_its_weights_is_warned_about(tmp_path):
    problem = only(found(tmp_path, PER_TOKEN, "new, advantages, weights"))
    assert (problem.code, problem.severity) == ("weights-unused", "warning")
    assert not found(tmp_path, "return -weights * new.logprobs * advantages, {}", "new, advantages, weights")
    assert not found(
        tmp_path, "return -new.logprobs * advantages * (weights < 2), {}", "new, advantages, weights"
    )


def test_the_loss_check_leaves_the_global_rng_unchanged(tmp_path):
    import torch

    torch.manual_seed(3)
    found(tmp_path, "return -new.logprobs * advantages * torch.rand_like(advantages), {}")
    drawn = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(4))
