"""Several losses in one step of a flow: the columns that they read, their settings, and refused combinations."""

import pytest
import torch

import rlflow
from rlflow import FlowError, flow, loss, row, stage
from rlflow.author.joint import JointLoss, terms
from rlflow.compiler.check.checker import check
from rlflow.compiler.graph import draw
from rlflow.compiler.graph.diff import diff
from rlflow.compiler.graph.model import Op
from rlflow.compiler.trace.compile import compile_flow


@stage(gives={"right": row("bool")})
def judged(scores):
    return scores > 0


@stage(gives="advantages")
def spread(scores, mask):
    return scores[:, None] * mask


@loss
def policy(new, advantages, *, clip=0.2):
    return -new.logprobs * advantages, {}


@loss(new=("logprobs", "entropy"))
def likelihood(new, advantages=None, *, clip=0.2, power=1.0):
    return -new.logprobs, {}


@loss(new="values")
def regression(new):
    return new.values, {}


@loss
def scaled(new, *, scale):
    return new.logprobs * scale, {}


@loss
def averaged(new):
    return new.logprobs.mean(), {}


def made(losses=(policy, likelihood), **settings):
    @flow
    def both(prompts, actor, reward):
        batch = actor.generate(prompts, samples=2, max_tokens=4)
        batch |= reward(batch)
        batch |= judged(batch)
        batch |= spread(batch)
        actor.update(batch, losses, **settings)

    return both


def test_an_update_reads_the_columns_of_its_losses_and_of_their_rows():
    graph = compile_flow(
        made(scale=(1, 0.5), where=(None, "right"), mean=("tokens", "row-tokens"), power=2.0)
    ).graph
    (node,) = [node for node in graph.nodes if node.op is Op.UPDATE]
    assert {"advantages", "right"} <= {item.parameter for item in node.inputs}
    assert node.settings.losses == ("policy", "likelihood")
    assert (node.settings.scale, node.settings.where, dict(node.settings.own)["power"]) == (
        (1.0, 0.5),
        (None, "right"),
        2.0,
    )


@pytest.mark.parametrize(
    "other",
    [
        {"scale": (1, 0.1)},
        {"where": ("right", None)},
        {"mean": ("tokens", 4)},
        {"losses": (likelihood, policy)},
        {"losses": policy},
    ],
)
def test_scales_and_row_choices_of_losses_change_the_graph(other):
    assert diff(compile_flow(made()).graph, compile_flow(made(**other)).graph)
    assert not diff(
        compile_flow(made()).graph, compile_flow(made(scale=(1.0, 1.0), where=[None, None])).graph
    )


def test_each_loss_gets_its_own_settings_and_average():
    joint = JointLoss((policy, likelihood, policy), (1, 2, 3), (None, "right", None))
    first, second, third = terms(
        joint, {"clip": 0.1, "power": 2.0, "scale": (1, 2, 3)}, ("tokens", "rows", 3)
    )
    assert (first.settings, second.settings) == ({"clip": 0.1}, {"clip": 0.1, "power": 2.0})
    assert [term.mean for term in (first, second, third)] == ["tokens", "rows", 3]
    assert [term.prefix for term in (first, second, third)] == ["policy/", "likelihood/", "policy#2/"]
    assert joint.new == ("logprobs", "entropy")
    assert JointLoss((likelihood, policy), (1, 1), (None, None)).new == ("logprobs", "entropy")
    assert [column.optional for column in joint.signature.columns if column.name == "advantages"] == [False]


@pytest.mark.parametrize(
    ("losses", "settings", "code", "says"),
    [
        ((policy, likelihood), {"scale": (1,)}, "joint-losses", "write scale=(…, …)"),
        ((policy, likelihood), {"where": (None, "wrong")}, "missing-column", "wrong"),
        ((policy, likelihood), {"where": (None, "scores")}, "wrong-kind", "bool"),
        ((policy, likelihood), {"mean": ("tokens", "all")}, "setting-range", "a tuple with one for each"),
        (
            (policy, likelihood),
            {"mean": ("tokens", "rows")},
            "loss-value",
            'mean="rows" does not average such values',
        ),
        ((policy, likelihood), {"scale": 0.5}, "setting-range", "a tuple with one number for each loss"),
        ((policy, likelihood), {"weight": 0.5}, "unknown-setting", "weight"),
        ((policy, regression), {}, "two-heads", "losses that use one head"),
        ((policy, averaged), {}, "loss-value", "already averaged"),
        ((policy, scaled), {}, "joint-losses", "rename the setting"),
        ((policy, print), {}, "not-a-loss", "@loss"),
        ((), {}, "not-a-loss", "@loss"),
    ],
)
def test_incompatible_losses_are_refused_at_the_update(losses, settings, code, says):
    errors = check(made(losses, **settings), with_variants=False).errors
    assert code in [error.code for error in errors]
    (error,) = [error for error in errors if error.code == code][:1]
    assert says in str(FlowError(error))
    assert error.place.path == __file__


def test_each_of_several_losses_corrects_for_stale_rows():
    errors = check(made(), with_variants=False, staleness=1).errors
    assert [error.code for error in errors] == ["stale-uncorrected"] * 2
    assert [error.definition for error in errors] == [policy.place, likelihood.place]


@loss(stale_ok="likelihood has no ratio", unrewarded="it keeps to the data")
def waived(new):
    return -new.logprobs, {}


def test_a_reason_waives_the_correction_of_its_loss_and_is_printed():
    report = check(made(waived), with_variants=False, staleness=1)
    assert not report.errors
    (problem,) = [problem for problem in report.problems if problem.code == "stale-waived"]
    assert (problem.found, problem.severity) == ("stale_ok='likelihood has no ratio'", "note")
    errors = check(made((policy, waived)), with_variants=False, staleness=1).errors
    assert [error.definition for error in errors] == [policy.place]
    with pytest.raises(TypeError, match="the reason in words"):
        loss(stale_ok=True)


def test_an_eager_update_takes_several_losses(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1 + 1 =", "answer": "2"}\n' * 4)
    roles = rlflow.roles(made(), backend="null", data=str(data), prompts=2, held_out=0, threads=1)
    try:
        rows = roles["actor"].generate(roles.take(), max_tokens=2)
        rows |= rlflow.Batch(
            rows.axis, rlflow.Batch.of(right=[True, False], advantages=torch.ones(2, 2).tolist()).data
        )
        roles["actor"].update(rows, (policy, likelihood), where=(None, "right"))
        with pytest.raises(FlowError, match="a tuple of 2"):
            roles["actor"].update(rows, (policy, likelihood), where=("right",))
    finally:
        roles.close()


@loss
def of_a_column(new, bonus):
    return new.logprobs, {}


@loss
def of_a_row_column(new, bonus: row("float32")):
    return new.logprobs, {}


@pytest.mark.parametrize(
    "losses",
    [(of_a_column, of_a_row_column), (of_a_row_column, of_a_column), (of_a_row_column, of_a_row_column)],
)
def test_any_loss_may_declare_the_kind_of_a_column(losses):
    joint = JointLoss(losses, (1, 1), (None, None))
    assert [column.kind for column in joint.signature.columns if column.name == "bonus"] == [row("float32")]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "policy (tokens) + likelihood (tokens)"),
        (
            {"scale": (1.0, 0.25), "mean": ("tokens", 7), "where": (None, "right")},
            "policy (tokens) + 0.25 likelihood (7, where right)",
        ),
    ],
)
def test_every_drawing_shows_the_losses_of_a_step(settings, says):
    graph = compile_flow(made(**settings)).graph
    assert draw.text(graph).splitlines()[-1].endswith(f")  of {says}")
    assert f'[["actor.update: {says}"]]' in draw.mermaid(graph)
    assert f'[label="actor.update: {says}"];' in draw.dot(graph)
    assert f">{says}</text>" in draw.svg(graph)
    assert " of " not in draw.text(compile_flow(made(policy)).graph)
