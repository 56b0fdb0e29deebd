"""`check` follows the scores of a reward to the gradient of an update and reports where the path breaks."""

import itertools
import re
import textwrap

import pytest
import torch

from rlflow import loss
from rlflow.author.load import load_flow
from rlflow.compiler.check.checker import check
from rlflow.compiler.check.influence import has_gradient, influential, moved
from rlflow.compiler.check.losses import column_kinds
from rlflow.compiler.trace.compile import TraceOptions
from rlflow.rewards.environments.environment_spec import parse_environment

NUMBERS = itertools.count()
HEAD = """
import torch
from rlflow import RANK0, ask, choose, concat, flow, group, group_mean, loss, repeat, row, scalar, stage, text

@stage(gives="advantages", rows="group")
def centred(scores, group, mask):
    return (scores - group_mean(scores, group))[:, None] * mask

@stage(gives="keep", rows="group")
def mixed(scores, group):
    return scores == scores

@stage(gives={"good": row("bool")})
def good(scores):
    return scores > 0

@stage(gives={"question": text})
def again(completion):
    return completion

@stage(gives={"question": text})
def told(completion, scores):
    return completion

@stage(gives={"heat": scalar("float32")}, dispatch=RANK0)
def heated(scores, heat):
    return heat + scores.mean()

@loss
def gain(new, advantages):
    return -new.logprobs * advantages, {}

@loss
def likelihood(new):
    return -new.logprobs, {}
"""


def load(tmp_path, source):
    path = tmp_path / str(next(NUMBERS)) / "tried.py"  # a file is loaded once
    path.parent.mkdir()
    path.write_text(HEAD + source)
    return load_flow(str(path))


def found(tmp_path, body, more="", head="@flow"):
    source = f"{more}\n{head}\ndef tried(prompts, actor, reward):\n" + "\n".join(
        f"    {line}" for line in body.strip().split("\n")
    )
    report = check(load(tmp_path, source), with_variants=False)
    return [
        problem
        for problem in report.problems
        if problem.code not in ("never-read", "replaced-unread", "role-unused")
    ]


SAMPLED = "batch = actor.generate(prompts, samples=2, max_tokens=4)\nbatch |= reward(batch)\n"


@pytest.mark.parametrize(
    "body",
    [
        "batch |= centred(batch)\nactor.update(batch, gain)",
        "actor.update(choose(batch | good(batch), 'good'), likelihood)",
        "actor.update(choose(batch, top='scores', count=1, per='group'), likelihood)",
        (
            "second = actor.generate(ask(batch | told(batch), 'question'), "
            "max_tokens=4)\nactor.update(second, likelihood)"
        ),
        "actor.update(concat(choose(batch | good(batch), 'good'), batch), likelihood)",
    ],
)
def test_scores_reach_the_update_by_columns_and_by_chosen_rows(tmp_path, body):
    assert found(tmp_path, SAMPLED + body) == []


def test_scores_reach_the_update_by_the_groups_kept_by_a_repeat(tmp_path):
    body = (
        "def body(prompts):\n    rows = actor.generate(prompts, samples=2, max_tokens=4)\n    rows |= "
        "reward(rows)\n"
        "    return rows | mixed(rows)\nactor.update(repeat(body, prompts, groups=2, tries=2), likelihood)"
    )
    assert found(tmp_path, body) == []


def test_scores_reach_the_update_by_state_of_the_next_iteration(tmp_path):
    state = "@stage(gives='advantages')\ndef by_heat(mask, heat):\n    return heat * mask\n"
    body = SAMPLED + "batch |= by_heat(batch)\nheated(batch)\nactor.update(batch, gain)"
    assert found(tmp_path, body, state, '@flow(state=lambda hp: {"heat": 1.0})') == []


def test_scores_reach_the_update_by_weights_trained_on_them(tmp_path):
    more = (
        "@loss(new='values')\ndef regress(new, scores):\n    return (new.values - scores[:, None]) ** 2, {}\n"
        "@stage(gives='advantages')\ndef from_values(values):\n    return values\n"
    )
    body = (
        SAMPLED + "batch |= critic.values(batch)\nbatch |= from_values(batch)\ncritic.update(batch, "
        "regress)\nactor.update(batch, gain)"
    )
    source = f"{more}\n@flow\ndef tried(prompts, actor, critic, reward):\n    " + body.replace("\n", "\n    ")
    assert check(load(tmp_path, source), with_variants=False).ok


@pytest.mark.parametrize(
    ("body", "more", "path"),
    [
        (
            "batch |= centred(batch)\nactor.update(batch, likelihood)",
            "",
            "centred gives advantages (…); no update reads this",
        ),
        (
            "batch |= centred(batch)\nactor.update(batch, zero)",
            "@loss\ndef zero(new, advantages):\n    return -new.logprobs - advantages, {}\n",
            "actor.update reads 'advantages', but the gradient of loss 'zero' does not depend on it (…)",
        ),
        ("actor.update(batch, likelihood)", "", "reward gives scores (…); no update reads this"),
    ],
)
def test_an_unreached_reward_is_an_error_with_its_path(tmp_path, body, more, path):
    (problem,) = found(tmp_path, SAMPLED + body, more)
    assert (problem.code, problem.severity) == ("reward-unreached", "error")
    assert str(problem.place).endswith(str(problem.place.line))
    shown = re.sub(r"\([^()]*tried\.py:\d+\)", "(…)", problem.found)
    assert shown.startswith("reward gives scores (…)")
    assert shown.endswith(path)
    assert problem.definition.path.endswith("tried.py")


def test_a_reason_waives_an_unreached_reward_and_is_printed(tmp_path):
    more = "@loss(unrewarded='it follows the samples')\ndef copied(new):\n    return -new.logprobs, {}\n"
    (problem,) = found(tmp_path, SAMPLED + "actor.update(batch, copied)", more)
    assert (problem.code, problem.severity, problem.found) == (
        "reward-waived",
        "note",
        "unrewarded='it follows the samples'",
    )
    (problem,) = found(
        tmp_path, "batch = actor.generate(prompts, max_tokens=4)\nactor.update(batch, copied)", more
    )
    assert (problem.code, problem.severity, problem.found) == (
        "reward-waived",
        "note",
        "unrewarded='it follows the samples'",
    )
    with pytest.raises(TypeError, match="the reason in words"):
        loss(unrewarded=True)


def test_a_gradient_of_zero_for_all_rows_has_its_own_error(tmp_path):
    more = (
        "@loss\ndef still(new, advantages):\n    return -(new.logprobs - new.logprobs.detach()).exp() "
        "* advantages.detach() * 0, {}\n"
    )
    problems = found(tmp_path, SAMPLED + "batch |= centred(batch)\nactor.update(batch, still)", more)
    assert [problem.code for problem in problems] == ["reward-unreached", "loss-zero-gradient"]


def test_a_flow_without_a_reward_or_answers_is_noted(tmp_path):
    (problem,) = found(
        tmp_path, "batch = actor.generate(prompts, max_tokens=4)\nactor.update(batch, likelihood)"
    )
    assert (problem.code, problem.severity) == ("no-signal", "note")


def test_an_environment_counts_as_a_source_of_rewards(tmp_path):
    more = "@stage(gives='advantages')\ndef paid(turn_rewards, mask):\n    return turn_rewards * mask\n"
    body = SAMPLED.partition("batch |= reward")[0] + "batch |= paid(batch)\nactor.update(batch, gain)"
    options = TraceOptions(environments={"": parse_environment("retry", {})})
    flow = load(tmp_path, more + "@flow\ndef tried(prompts, actor):\n" + textwrap.indent(body, "    "))
    assert check(flow, options=options, with_variants=False).problems == ()


def test_a_role_trained_without_a_reward_is_warned_about(tmp_path):
    source = (
        "@flow\ndef tried(prompts, one, other, reward):\n    batch = one.generate(prompts, samples=2, "
        "max_tokens=4)\n    batch |= reward(batch)\n    batch |= centred(batch)\n    one.update(batch, "
        "gain)\n    rows = other.generate(prompts, max_tokens=4)\n    other.update(rows, likelihood)\n"
    )
    problems = check(load(tmp_path, source), with_variants=False).problems
    assert [(problem.code, problem.severity) for problem in problems] == [("role-untaught", "warning")]


def test_influence_is_checked_by_size_and_sign():
    from rlflow.algorithms.grpo import grpo
    from rlflow.compiler.trace.compile import compile_flow

    program = compile_flow(grpo)
    node = program.graph.by_name["actor.update"]
    policy, kinds = (
        program.functions["actor.update"],
        column_kinds(program.graph, node, program.functions["actor.update"]),
    )
    settings = {"clip": 0.2, "beta": 0.0}
    assert influential(policy, kinds, settings, frozenset(kinds)) == {"logprobs", "advantages", "weights"}
    assert has_gradient(policy, kinds, settings)
    others = moved(torch.zeros(3))
    assert len(others) == 6
    assert all(any(torch.equal(other, -each) for other in others) for each in others)  # as far down as up


def test_one_reward_does_not_replace_another_unreached_one(tmp_path):
    source = (
        "@flow\ndef tried(prompts, actor, reward, other):\n    batch = actor.generate(prompts, samples=2, "
        "max_tokens=4)\n    batch |= other(batch, gives='liked')\n    batch |= reward(batch)\n    batch |= "
        "centred(batch)\n    actor.update(batch, gain)\n"
    )
    problems = check(load(tmp_path, source), with_variants=False).problems
    assert [problem.code for problem in problems if problem.severity == "error"] == ["reward-unreached"]
