"""`check` warns once about each stage with side effects and states what a checkpoint stores of it."""

from rlflow import compare, flow, loss, repeat, stage, truncated_weights
from rlflow.compiler.check.checker import check


@stage(pure=False)
def noted(scores):
    return {}


@stage(on="actor", pure=False)
def moved(actor, scores):
    return {}


@stage
def doubled(scores):
    return {}


@loss
def policy_loss(new, logprobs, advantages):
    return -(new.logprobs - logprobs).exp() * advantages, {}


@flow
def noting(prompts, actor, reward):
    batch = actor.generate(prompts, samples=2, max_tokens=4)
    batch |= reward(batch)
    noted(batch)
    noted(batch)
    moved(batch)
    doubled(batch)
    batch |= actor.logprobs(batch)
    batch |= compare(batch)
    actor.update(batch, policy_loss)


@stage(gives="keep", rows="group", pure=False)
def unseen(scores, group):
    return scores > 0


@loss
def weighted_loss(new, logprobs, weights):
    return -weights * (new.logprobs - logprobs).exp(), {}


@flow
def repeating(prompts, actor, reward):
    def body(prompts):
        rows = actor.generate(prompts, samples=2, max_tokens=4)
        rows |= reward(rows)
        return rows | unseen(rows)

    batch = repeat(body, prompts, groups=2, tries=2)
    batch |= actor.logprobs(batch)
    batch |= truncated_weights(batch, cap=2.0)
    actor.update(batch, weighted_loss)


def test_a_stage_with_side_effects_does_not_run_ahead_of_training():
    [problem] = check(repeating, staleness=1).errors
    assert (problem.code, problem.found) == (
        "staleness-repeat",
        "side effects that no seed reproduces (pure=False)",
    )
    assert check(repeating).ok


def test_each_stage_with_side_effects_is_warned_about_once():
    report = check(noting)
    found = [problem for problem in report.problems if problem.code == "side-effects"]
    assert report.ok
    assert [problem.message for problem in found] == [
        "stage 'noted' has side effects that checkpoints do not store",
        "stage 'moved' has side effects that checkpoints do not store",
    ]
    assert [problem.found for problem in found] == [
        "pure=False",
        "pure=False, except the weights of 'actor'",
    ]
    assert {problem.severity for problem in found} == {"warning"}
    assert found[0] in report.of_functions  # the start of a run and a resumed run print it


def test_a_stage_refused_by_several_ranks_is_noted():
    [note] = [problem for problem in check(noting).problems if problem.code == "lone-change"]
    assert (note.severity, note.found) == ("note", "dispatch=DP_COMPUTE, pure=False")
    assert note.remedy.startswith("write dispatch=ALL")
